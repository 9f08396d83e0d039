"""What launchers tell a process: torchrun, Open MPI, MPICH and Slurm, and what they get wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import BackendUnavailable
from potluck.launch_env import AGENT_STORE_PORTS, DEFAULT_MASTER_PORT, first_host, read_launch
from potluck.net.addresses import parse_address

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "29400",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "2",
}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_NODELIST": "gpu[001-008]",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    """The same environment with some variables unset."""
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "rank", "world_size", "masters", "launcher"),
    [
        (TORCHRUN, 1, 2, ("10.0.0.5:29400",), "torchrun or the environment"),
        (OPEN_MPI, 2, 4, ("127.0.0.1:29500",), "Open MPI"),
        (MPICH, 0, 3, ("127.0.0.1:29500",), "MPICH or Intel MPI"),
        (SLURM, 5, 8, ("gpu007:24711",), "Slurm"),
    ],
)
def test_every_launcher_is_understood(
    environ: dict[str, str], rank: int, world_size: int, masters: tuple[str, ...], launcher: str
) -> None:
    """Rank, size and rank 0's address come from whichever launcher started us."""
    launch = read_launch(environ)
    assert (launch.rank, launch.world_size) == (rank, world_size)
    assert (launch.masters, launch.launcher) == (masters, launcher)


def test_the_plain_variables_win() -> None:
    """What torchrun starts inside a Slurm job or under mpirun listens to torchrun."""
    assert read_launch({**SLURM, **MPICH, **OPEN_MPI, **TORCHRUN}).rank == 1
    assert read_launch({**SLURM, **MPICH, **OPEN_MPI}).rank == 2


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_a_launcher_is_passed_over(name: str) -> None:
    """A stray RANK in a Slurm job says nothing without a size, and the other way round."""
    assert read_launch({**SLURM, **without(TORCHRUN, name)}).launcher == "Slurm"


def test_nobody_launched_us() -> None:
    """The error says how to be launched."""
    with pytest.raises(BackendUnavailable, match=r"torchrun, mpirun or srun.*RANK, WORLD_SIZE"):
        read_launch({"HOME": "/root"})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_a_launcher_alone_is_pointed_out(name: str) -> None:
    """Who has set one by hand learns that the other is missing too."""
    with pytest.raises(BackendUnavailable, match=f"only {name} is set"):
        read_launch({name: "1", "MASTER_ADDR": "desk"})


@pytest.mark.parametrize(
    "value", ["", "one", "-1", "1.5", "0x1", "1_0", "¹", "٣", "1 2", "9" * 5000]
)
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_what_is_no_number_is_refused_by_name(name: str, value: str) -> None:
    """The variable at fault is named, so that it can be found."""
    with pytest.raises(BackendUnavailable, match=name):
        read_launch({**TORCHRUN, name: value})


def test_spaces_around_a_number_do_no_harm() -> None:
    """Shell scripts leave them behind."""
    assert read_launch({**TORCHRUN, "RANK": " 1\n"}).rank == 1


@pytest.mark.parametrize("port", ["0", "65536", "70000"])
@pytest.mark.parametrize("agent", ["True", "False"])
def test_a_port_that_cannot_be_is_refused(port: str, agent: str) -> None:
    """Neither rounded nor wrapped: the number in the error is the one that was set."""
    environ = {**TORCHRUN, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": agent}
    with pytest.raises(BackendUnavailable, match=f"MASTER_PORT must be .*{port}"):
        read_launch(environ)


def test_without_a_port_it_is_the_one_pytorch_users_expect() -> None:
    """Only Slurm jobs get one of their own."""
    launch = read_launch(without(TORCHRUN, "MASTER_PORT"))
    assert launch.masters == (f"10.0.0.5:{DEFAULT_MASTER_PORT}",)


@given(st.integers(0, 10**12))
def test_two_slurm_jobs_on_one_machine_do_not_meet(job: int) -> None:
    """Consecutive jobs get different ports, none that an outgoing connection may have."""
    ports = [
        parse_address(read_launch({**SLURM, "SLURM_JOB_ID": str(number)}).masters[0]).port
        for number in (job, job + 1)
    ]
    assert ports[0] != ports[1]
    assert all(1024 <= port < 32768 for port in ports)


@pytest.mark.parametrize("job", ["", "12_3", "x"])
def test_an_odd_job_number_gives_the_usual_port(job: str) -> None:
    """Every rank of the job sees the same odd number, so they still agree."""
    assert read_launch({**SLURM, "SLURM_JOB_ID": job}).masters == ("gpu007:29500",)


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, None),
        ({**MPICH, "MPI_LOCALNRANKS": "2"}, None),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), None),
        (without(TORCHRUN, "MASTER_ADDR"), None),
        ({**TORCHRUN, "MASTER_ADDR": ""}, None),
        (without(SLURM, "SLURM_STEP_NODELIST"), "gpu001"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "gpu001"),
        (without(SLURM, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), None),
        (
            {
                **without(SLURM, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
                "SLURM_NODELIST": "old1,old2",
            },
            "old1",
        ),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_JOB_NODELIST": "a[3-4]"}, "a3"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "desk"}, "desk"),
    ],
)
def test_where_rank_0_is(environ: dict[str, str], host: str | None) -> None:
    """Told, or inferred when all are on one machine or Slurm lists the hosts; never guessed."""
    if host is None:
        with pytest.raises(BackendUnavailable, match="Set MASTER_ADDR"):
            read_launch(environ)
    else:
        assert parse_address(read_launch(environ).masters[0]).host == host


@pytest.mark.parametrize("port", [29400, 65535, 65533])
@pytest.mark.parametrize("word", ["True", "true", "TRUE"])
def test_the_port_of_torchruns_own_store_is_left_alone(port: int, word: str) -> None:
    """Its agent listens there already; all ranks try the same few ports beside it, in order."""
    environ = {
        **TORCHRUN,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": word,
    }
    ports = [parse_address(master).port for master in read_launch(environ).masters]
    assert len(set(ports)) == AGENT_STORE_PORTS
    assert port not in ports
    assert all(0 < other <= 65535 for other in ports)
    assert read_launch({**environ, "RANK": "0"}).masters == read_launch(environ).masters


def test_without_an_agent_store_the_port_is_ours() -> None:
    """The word False is how torchrun says so."""
    environ = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert read_launch(environ).masters == ("10.0.0.5:29400",)


@pytest.mark.parametrize(
    ("host", "master"),
    [
        ("::1", "[::1]:29400"),
        ("fe80::1%eth0", "[fe80::1%eth0]:29400"),
        ("[2001:db8::5]", "[2001:db8::5]:29400"),
        ("desk.local", "desk.local:29400"),
        (" 10.0.0.5 ", "10.0.0.5:29400"),
    ],
)
def test_an_ipv6_master_gets_its_brackets(host: str, master: str) -> None:
    """However the launcher writes the host, the result reads back as host and port."""
    (found,) = read_launch({**TORCHRUN, "MASTER_ADDR": host}).masters
    assert found == master
    assert parse_address(found).port == 29400


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("desk", "desk"),
        ("desk,laptop", "desk"),
        ("gpu[007-012,020],cpu1", "gpu007"),
        ("gpu[3]", "gpu3"),
        ("gpu[9,1-3]-ib,cpu", "gpu9-ib"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("a1,b[2-3]", "a1"),
        ("node-a.example.org,node-b.example.org", "node-a.example.org"),
        ("[1-3]x", "1x"),
    ],
)
def test_the_first_host_of_slurms_notation(nodelist: str, host: str) -> None:
    """Ranges, lists, leading zeros and several dimensions."""
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", ",", ",a", "gpu[", "gpu]", "gpu[]", "gpu[1-2", "a[b[1]]"])
def test_what_is_no_list_of_hosts_is_refused(nodelist: str) -> None:
    """Rather a clear word now than a name that no resolver knows later."""
    with pytest.raises(BackendUnavailable, match="not a list of hosts"):
        first_host(nodelist)


@given(st.text())
def test_any_text_is_a_host_or_is_refused(nodelist: str) -> None:
    """No other error, and no bracket or comma ever reaches the resolver."""
    try:
        host = first_host(nodelist)
    except BackendUnavailable:
        return
    assert host
    assert not set(host) & set("[],")


VALUES = ["", "0", "1", "2", "4", "x", "-1", "99999", "desk", "::1"]
NAMES = sorted({*TORCHRUN, *OPEN_MPI, *MPICH, *SLURM, "SLURM_NODELIST"})


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.sampled_from([*VALUES, *["a[1-2]", "a[", ","] * name.endswith("NODELIST")])
            for name in NAMES
        },
    )
)
def test_any_environment_is_a_launch_or_is_refused(environ: dict[str, str]) -> None:
    """Whatever a launcher or a shell left behind, the answer is ours, and every address reads."""
    try:
        launch = read_launch(environ)
    except BackendUnavailable:
        return
    assert launch.masters
    for master in launch.masters:
        assert 0 < parse_address(master).port <= 65535
