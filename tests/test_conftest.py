"""The rules of conftest.py do what they say: each is run on planted tests in its own pytest."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

RULES = (Path(__file__).parent / "conftest.py").read_text(encoding="utf-8")

SKIPS = {
    "test_marked": """
        import pytest
        @pytest.mark.skip(reason="no moon tonight")
        def test_marked():
            pass
        """,
    "test_inside": """
        import pytest
        def test_inside():
            pytest.skip("no moon tonight")
        """,
    "test_in_a_fixture": """
        import pytest
        @pytest.fixture
        def moon():
            pytest.skip("no moon tonight")
        def test_in_a_fixture(moon):
            pass
        """,
    "test_whole_file": """
        import pytest
        pytest.skip("no moon tonight", allow_module_level=True)
        """,
    "test_expected": """
        import pytest
        @pytest.mark.xfail(reason="an expected failure is no skip")
        def test_expected():
            assert False
        """,
}


@pytest.fixture
def inner(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with our conftest.py and nothing else."""
    pytester.makeconftest(RULES)
    pytester.makeini("[pytest]\nmarkers = netns: needs network namespaces\n")
    return pytester


def run(inner: pytest.Pytester, **files: str) -> pytest.RunResult:
    """The result of a pytest that runs these files in a process of its own, in order."""
    inner.makepyfile(**files)
    plugins = ("-p", "no:randomly", "-p", "no:cacheprovider")
    return inner.runpytest_subprocess(*plugins, "--continue-on-collection-errors", "-rs")


def test_a_skip_fails_in_ci(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CI=true a skipped test, fixture or file is red, and the reason is shown."""
    monkeypatch.setenv("CI", "true")
    result = run(inner, **SKIPS)
    assert result.parseoutcomes() == {"failed": 1, "errors": 3, "xfailed": 1}
    assert str(result.stdout).count("a skip is a failure.  ") == 4
    assert str(result.stdout).count("no moon tonight") >= 4


def test_a_skip_is_a_skip_elsewhere(
    inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without CI=true a skip stays a skip."""
    monkeypatch.delenv("CI", raising=False)
    assert run(inner, **SKIPS).parseoutcomes() == {"skipped": 4, "xfailed": 1}


def test_namespaces_are_asked_for_with_a_reason(
    inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the program ip is missing, a test marked netns is skipped and says what it needs."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PATH", str(inner.path))
    source = """
        import pytest
        @pytest.mark.netns
        def test_it():
            assert False
        """
    result = run(inner, test_it=source)
    assert result.parseoutcomes() == {"skipped": 1}
    result.stdout.fnmatch_lines(["*need the program ip*"])


def test_a_thread_left_behind_is_found(inner: pytest.Pytester) -> None:
    """A thread of ours and a non-daemon one fail their test; one that is ending does not."""
    source = """
        import threading

        def start(seconds, name, daemon):
            work = threading.Event().wait
            threading.Thread(target=work, args=(seconds,), name=name, daemon=daemon).start()

        def test_ending():
            start(0.1, "potluck-ending", False)

        def test_stranger():
            start(20, "stranger", True)

        def test_ours():
            start(20, "potluck-pump", True)

        def test_holding():
            start(1.5, "holding", False)
        """
    inner.makeconftest(RULES.replace("GRACE = 2.0", "GRACE = 0.5"))
    result = run(inner, test_threads=source)
    assert result.parseoutcomes() == {"passed": 4, "errors": 2}
    result.stdout.fnmatch_lines(
        ["*left the thread 'potluck-pump' running*", "*left the thread 'holding' running*"]
    )
