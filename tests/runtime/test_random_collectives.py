"""Random programs of collectives, compared with what numpy says they must give."""

from hypothesis import given, settings
from hypothesis import strategies as st

from support.contexts import in_group
from support.programs import Step, compare, run, steps

PROGRAMS = st.integers(1, 5).flatmap(lambda size: st.lists(steps(size), min_size=1, max_size=12))


@settings(max_examples=30)
@given(PROGRAMS)
def test_random_programs_give_what_numpy_says(program: list[Step]) -> None:
    """Whatever comes after whatever, waited for at once or at the end."""
    size = len(program[0].counts)
    for rank, results in enumerate(in_group(size, lambda context: run(program, context))):
        compare(program, rank, results)
