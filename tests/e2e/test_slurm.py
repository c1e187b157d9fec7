"""`scripts/slurm.sbatch` under a real Slurm of two nodes, all on this machine: warned, requeued, resumed, cancelled."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlplace.checkpoints.find import find, verify
from tests.e2e.training import ROOT, SMALL, placed

SCRIPT = ROOT / "scripts" / "slurm.sbatch"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue", "srun")
LACKING = [name for name in PROGRAMS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        bool(LACKING), reason=f"Slurm is not installed: no {', '.join(LACKING)}"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd is run by root"),
]

NODES = ("n1", "n2")
LIMIT_S = 300.0  # for anything that is waited for
ENDLESS = (
    *(
        "env.id=CartPole-v1",
        "actor.optimizer.schedule=constant",
        "runner.stop_at_return=null",
    ),
    *("runner.total_iterations=390625", "checkpoint.every=0"),
)
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=bf_interval=5
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=60
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def until(what: str, true: Callable[[], object]) -> None:
    late_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < late_s, f"{what} within {LIMIT_S:g} s"
        time.sleep(0.2)


class Slurm:
    """The client's side of a Slurm, and the folder from which jobs are submitted."""

    def __init__(self, configured: Path, folder: Path) -> None:
        self.folder, self.configured = folder, configured
        self._variables = {
            **os.environ,
            "SLURM_CONF": str(configured),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HEAD_ADDRESS": "127.0.0.1",
            "RAY_AUTH_MODE": "disabled",
        }

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._variables,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *options: str, job: tuple[str, ...]) -> str:
        words = (*SMALL, *ENDLESS, *job, "checkpoint.grace_s=50")
        return self.call(
            "sbatch",
            "--parsable",
            "--cpus-per-task=2",
            *options,
            str(SCRIPT),
            "hybrid_ppo",
            *words,
        )

    def state(self, job: str) -> str:
        """Return `RUNNING` and the like."""
        return self.call(
            "squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}"
        )

    def shown(self, job: str, key: str) -> str:
        words = self.call("scontrol", "show", "job", job).split()
        return next(
            word.partition("=")[2] for word in words if word.startswith(f"{key}=")
        )

    def start_now(self, job: str, restarts: int) -> None:
        """Have a job that was requeued run; Slurm itself lets it wait a while."""
        until(
            f"job {job} is queued again",
            lambda: self.shown(job, "Restarts") == str(restarts) or self._hurry(job),
        )

    def _hurry(self, job: str) -> None:
        with contextlib.suppress(AssertionError):  # it runs, or has not ended yet
            self.call("scontrol", "update", f"JobId={job}", "StartTime=now")

    def warn(self, job: str) -> None:
        """Send what `--signal=B:USR1@120` sends before a time limit."""
        self.call("scancel", "--batch", "--signal=USR1", job)

    def output(self, job: str) -> str:
        return "".join(
            file.read_text(encoding="utf-8")
            for file in self.folder.glob(f"slurm-{job}*.out")
        )

    def run_of(self, job: str) -> Path:
        """Return the folder of a job's run, of which there is one."""
        (run,) = (self.folder / "runs" / f"slurm_{job}" / "hybrid_ppo").iterdir()
        return run

    def iterations(self, job: str) -> int:
        files = [
            *(self.folder / "runs" / f"slurm_{job}").glob("hybrid_ppo/*/metrics.jsonl")
        ]
        return sum(file.read_text(encoding="utf-8").count("\n") for file in files)

    def trained(self, job: str, iterations: int) -> None:
        def true() -> bool:
            state = self.state(job)
            assert state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), (
                f"{state}\n{self.output(job)}"
            )
            return self.iterations(job) >= iterations

        until(f"job {job} has trained {iterations} iterations", true)

    def saved(self, job: str) -> int:
        """Return the iterations of a job's checkpoint, which is whole; nothing that it has trained is lost."""
        checkpoint = find(str(self.run_of(job)), Path())
        assert checkpoint is not None
        verify(checkpoint)
        assert checkpoint.iteration == self.iterations(job)
        return checkpoint.iteration


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A controller and two nodes that listen on 127.0.0.1; all that they started is gone afterwards."""
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp", prefix="slurm"))
        )
        doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [door.getsockname()[1] for door in doors]
        for door in doors:
            door.close()
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (folder / name).mkdir()
        conf = folder / "slurm.conf"
        host = socket.gethostname().partition(".")[0]
        conf.write_text(
            CONF.format(host=host, ports=ports, folder=folder), encoding="utf-8"
        )
        for command in (
            ["slurmctld", "-D", "-c"],
            *(["slurmd", "-D", "-N", node] for node in NODES),
        ):
            daemon = subprocess.Popen(
                command,
                env={**os.environ, "SLURM_CONF": str(conf)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
        ours = Slurm(conf, tmp_path_factory.mktemp("jobs"))
        until(
            "both nodes are idle",
            lambda: _answer(ours, "sinfo", "--noheader", "--format=%T %D") == "idle 2",
        )
        version = ours.call("sbatch", "--version")
        print(f"tried with {version}")
        stack.callback(_end_jobs, ours)
        yield ours


def _answer(slurm: Slurm, *command: str) -> str:
    """Return what a command says; nothing while the controller does not answer."""
    with contextlib.suppress(AssertionError):
        return slurm.call(*command)
    return ""


def _end_jobs(slurm: Slurm) -> None:
    slurm.call("scancel", "--user=root")
    until("all jobs have ended", lambda: not slurm.call("squeue", "--noheader"))


@pytest.fixture(autouse=True)
def no_ray_left(slurm: Slurm) -> Iterator[None]:
    """Fail a test whose jobs leave servers of Ray."""
    yield
    _end_jobs(slurm)
    mark = (
        f"SLURM_CONF={slurm.configured}".encode()
    )  # not of other tests on this machine
    servers = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if (
                process.info["name"] in ("raylet", "gcs_server", "ray")
                and mark in environment
            ):
                servers.append(process.cmdline())
    assert servers == []


ONE_MACHINE = placed("0-1", "0", "1")


def test_a_job_that_is_warned_runs_again_and_one_that_is_cancelled_does_not(
    slurm: Slurm,
) -> None:
    job = slurm.submit(job=ONE_MACHINE)
    slurm.trained(job, 3)
    slurm.warn(job)
    slurm.start_now(job, 1)
    done = slurm.output(job)
    assert "SIGUSR1: ends after this iteration and saves" in done
    assert "stopped by SIGUSR1" in done
    saved = slurm.run_of(job)
    slurm.trained(job, slurm.iterations(job) + 3)
    assert "continues after iteration" in slurm.output(job)
    assert slurm.run_of(job) == saved, "it goes on in the folder of its run"

    # As at the end of a preemption's grace: SIGTERM to all of its processes, those of Ray too.
    slurm.call("scontrol", "requeue", job)
    until("it has saved", lambda: "stopped by SIGTERM" in slurm.output(job))
    before = slurm.saved(job)
    slurm.start_now(job, 2)
    slurm.trained(job, before + 3)
    assert f"continues after iteration {before}\n" in slurm.output(job)

    slurm.call("scancel", job)
    until("it has ended", lambda: slurm.state(job) == "CANCELLED")
    assert slurm.shown(job, "Restarts") == "2"
    assert slurm.saved(job) > before


def test_a_job_of_more_priority_takes_the_place_of_one_that_has_saved(
    slurm: Slurm,
) -> None:
    job = slurm.submit("--nodelist=n1", "--exclusive", job=ONE_MACHINE)
    slurm.trained(job, 3)
    urgent = slurm.call(
        *(
            "sbatch",
            "--parsable",
            "--partition=urgent",
            "--nodelist=n1",
            "--exclusive",
            "--output=/dev/null",
        ),
        *("--wrap", "sleep 1"),
    )
    until("the other job has run", lambda: slurm.state(urgent) == "COMPLETED")
    assert "stopped by SIGUSR1" in slurm.output(job)
    slurm.start_now(job, 1)
    slurm.trained(job, slurm.iterations(job) + 1)
    assert "continues after iteration" in slurm.output(job)


def test_the_time_limit_warns(slurm: Slurm) -> None:
    """A limit of three minutes and a warning one to two before it: Slurm may send it up to a minute earlier."""
    job = slurm.submit("--time=3", "--signal=B:USR1@60", job=ONE_MACHINE)
    slurm.trained(job, 3)
    until(
        "it is queued again",
        lambda: slurm.shown(job, "Restarts") == "1" or slurm.state(job) == "PENDING",
    )
    assert "stopped by SIGUSR1" in slurm.output(job)
    assert "TIME LIMIT" not in slurm.output(job)


def test_tasks_of_an_array_have_runs_of_their_own(slurm: Slurm) -> None:
    job = slurm.submit("--array=3-4", job=ONE_MACHINE)
    tasks = [f"{job}_{number}" for number in (3, 4)]
    for task in tasks:
        slurm.trained(task, 3)
        slurm.warn(task)
    for task in tasks:
        slurm.start_now(task, 1)
        slurm.trained(task, slurm.iterations(task) + 1)
        text = (slurm.run_of(task) / "config.yaml").read_text(encoding="utf-8")
        assert f"seed: {task.rpartition('_')[2]}\n" in text
        assert "continues after iteration" in slurm.output(task)


def test_two_machines_with_a_ray_of_the_job(slurm: Slurm) -> None:
    job = slurm.submit("--nodes=2", job=placed("0-1", "4", "5"))
    slurm.trained(job, 3)
    assert "(2 nodes x 4)" in slurm.output(job)
    slurm.warn(job)
    slurm.start_now(job, 1)
    slurm.trained(job, slurm.iterations(job) + 3)
    assert "continues after iteration" in slurm.output(job)
    slurm.call("scontrol", "requeue", job)
    until("it has saved", lambda: "stopped by SIGTERM" in slurm.output(job))
    slurm.saved(job)
