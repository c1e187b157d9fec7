"""Run a launch script in bash, and record the programs that it would launch, with their arguments.

The installed bash runs the script, so variables, conditions, loops and functions behave as usual. The programs that a
launch script starts (`python3`, `torchrun`, `ray`, ...) are replaced by stubs: a stub records its arguments and ends. A
few programs that read and print (`TOOLS`) are real; so are programs that write files, if the script is isolated. All
other programs do nothing.

A script is run isolated, in its own Linux namespaces. It has no network. Of the machine's files it has only the
libraries of the tools and the folder of the script, and of the user's environment only HOME and USER. Files that it
writes are in memory, and removed afterwards. Processor time, elapsed time, files and memory are limited. If the machine
permits no namespaces, only a script that the user trusts is run. Such a script can read and write all that the user
can; its environment and limits are the same.
"""

from __future__ import annotations

import dataclasses
import getpass
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlplace.codes import config_error

LAUNCHERS = (
    *("python", "python3", "python3.9", "python3.10", "python3.11", "python3.12"),
    *("python3.13", "torchrun", "ray", "accelerate", "deepspeed", "trl", "uv", "uvx"),
    *("mpirun", "srun", "sbatch", "numactl", "nsys", "taskset", "stdbuf"),
)
TOOLS = (
    *("awk", "basename", "bash", "cat", "cut", "date", "dirname", "egrep", "env"),
    *("expr", "fgrep", "gawk", "grep", "head", "hostname", "id", "ls", "mawk"),
    *("nohup", "nproc", "paste", "printenv", "readlink", "realpath", "sed", "seq"),
    *("sort", "stat", "tail", "timeout", "tr", "uname", "uniq", "wc", "whoami"),
    "xargs",
)
# Programs that change files; they do nothing where the script is not isolated
_WRITING = ("chmod", "cp", "ln", "mv", "rm", "tee", "touch")
# Programs that make what a later line of the script may write to
_MAKING = ("mkdir", "mktemp")
# Programs that set up the namespaces
_SYSTEM = ("mount", "umount", "pivot_root", "unshare", "setpriv")
SECONDS = 20  # most seconds of a script
PROCESSOR_SECONDS = 10  # most seconds of processor time of a process of a script
_SLACK = 10  # most seconds for setting up and removing the namespaces
_LIMITS = f"ulimit -t {PROCESSOR_SECONDS} -f 4096 -v 4000000 -n 256"
# For root, the limit of processes is the largest process id in the script's namespace: Linux 6.14 and later
_LIMITS_ISOLATED = (
    "ulimit -u 200; { echo 400 > /proc/sys/kernel/pid_max; } 2> /dev/null"
)
# Ends all other processes of the namespace, in which the shell is process 1; any other shell does nothing
_END_OTHERS = "[ $$ = 1 ] && kill -KILL -1"
_MOST_LAUNCHES = 100
_MOST_FOLDERS = (
    500  # most folders of other owners or groups in which a script can write
)
KILLED = 137  # exit code of a script that a limit ended
_NAMESPACES = ("user", "mount", "net", "pid", "ipc", "uts", "fork", "kill-child")
_LIBRARIES = ("/lib", "/lib64", "/lib32", "/usr/lib", "/usr/lib64", "/usr/lib32")
_END = b"\ncode "  # before the last line of what _RUN prints
# Settings of Linux that refuse namespaces to users: name, the refusing value, the value that permits them
_SETTINGS = (
    ("user.max_user_namespaces", "0", "10000"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
)
# What programs print if the kernel refuses what they ask for
_REFUSED = ("Operation not permitted", "Permission denied", "permission denied")
_PROJECT = (".git", "pyproject.toml", "setup.py", "setup.cfg")

# A stub: records its working folder, name and arguments, each ended by a NUL
_STUB = """#!{bash}
set -- "${{0##*/}}" "$@"
files=({log}/launch.*)
[ "${{#files[@]}}" -gt {most} ] && exit 0
printf '%s\\0' "$PWD" "$@" > "{log}/launch.$(printf %s "${{EPOCHREALTIME/[.,]/}}").$$"
exit 0
"""
_NOTHING = "#!{bash}\nexit 0\n"
_PASSES = '#!{bash}\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\nexec "$@"\n'
# Bash reads this text before each script, so that a missing program, file or folder, or a limit that cannot be raised
# here, does not end the script
_BEFORE = """command_not_found_handle() {{ printf '%s\\n' "$1" >> {log}/unknown; }}
cd() {{ builtin cd "$@" 2> /dev/null || printf '%s\\n' "cd $*" >> {log}/unknown; }}
source() {{
  if [ -r "$1" ]; then builtin source "$@"; else printf '%s\\n' "source $1" >> {log}/unknown; fi
}}
. () {{ source "$@"; }}
ulimit() {{ builtin ulimit "$@" 2> /dev/null || true; }}
export -f command_not_found_handle cd source ulimit
"""
# Runs the script, then prints each recorded file after its name and size
_RUN = """exec 3>&1
cd {folder}
(
  {limits}
  exec timeout -s KILL {seconds} {bash} {script} {words} > {log}/said 2>&1 < /dev/null 3>&-
)
code=$?
{after}
for file in {log}/launch.* {log}/unknown {log}/said; do
  [ -f "$file" ] || continue
  printf '%s %s\\n' "${{file##*/}}" "$(wc -c < "$file")" >&3
  cat "$file" >&3
done
printf '\\ncode %s\\n' "$code" >&3
"""
# Makes a root folder with only the tools, the libraries and the folder of the script, and runs _RUN in it
_ISOLATE = """set -e
mount -t tmpfs -o size=96m,mode=755 tmpfs {root}
cd {root}
mkdir -p usr/bin usr/local tmp dev proc etc .old .up .work .log .system
if [ -s {owned} ]; then (cd .up && xargs -0 mkdir -p -- < {owned}); fi
ln -s usr/bin bin
ln -s usr/bin sbin
ln -s ../bin usr/local/bin
cp {bin}/* usr/bin/
cp {copies} usr/bin/
cp {system} .system/
cp {before} .before
cp {run} .run
printf '%s:x:0:0::%s:/bin/bash\\n' {user} {home} > etc/passwd
for folder in {libraries}; do
  if [ -L "$folder" ]; then
    ln -s "$(readlink "$folder")" ".$folder"
  elif [ -d "$folder" ]; then
    mkdir -p ".$folder"
    mount --bind "$folder" ".$folder"
    mount -o remount,bind,ro ".$folder"
    if [ -w ".$folder" ]; then exit 97; fi
  fi
done
for device in null zero urandom; do
  touch "dev/$device"
  mount --bind "/dev/$device" "dev/$device"
done
mount -t proc proc proc || true
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/2 dev/stderr
ln -s /proc/self/fd/1 dev/stdout
mkdir -p .{project} .{home}
if [ -n {alone} ]; then
  cp {alone} .{project}/
elif ! mount -t overlay overlay -o lowerdir={project},upperdir=.up,workdir=.work .{project} 2> /dev/null; then
  mount --bind {project} .{project}
  mount -o remount,bind,ro .{project}
  if [ -w .{project} ]; then exit 97; fi
fi
mkdir -p .{home}
pivot_root . .old
PATH=/usr/bin
/.system/umount -l /.old
cd /
exec {command}
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A program that a script would launch.

    `program`: its name, such as python3. `words`: the words behind the name. `folder`: the working directory.
    """

    program: str
    words: tuple[str, ...]
    folder: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The result of a run of a script.

    `launches`: the launches, in order. `unknown`: missing programs, files and folders that the script uses. `code`:
    exit code of the script. `said`: error output of the script. `isolated`: whether the script was isolated.
    """

    launches: tuple[Launch, ...]
    unknown: tuple[str, ...]
    code: int
    said: str
    isolated: bool


def run_script(
    script: Path,
    words: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    *,
    trusted: bool = False,
) -> Ran:
    """Run a launch script in bash, with stubs for the programs that it launches.

    `words`: arguments of the script. `variables`: environment variables of the script besides HOME and USER. `trusted`:
    whether the script is run without isolation. Raises ConfigError if the machine has no bash, or cannot isolate the
    script.
    """
    typed = str(script)
    script = script.resolve()
    tools = _found(*TOOLS, *_WRITING, *_MAKING)
    if "bash" not in tools:
        raise config_error("import-script", "import", typed, error="no-bash")
    home = os.path.expanduser("~")
    environment = {
        "HOME": home,
        "USER": _user(),
        "LOGNAME": _user(),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "SHELL": "/bin/bash",
        **(variables or {}),
    }
    with tempfile.TemporaryDirectory(prefix="rlplace-import-") as name:
        place = Path(name)
        if trusted:
            said = _run_trusted(place, script, words, environment, tools)
            return _result(said, isolated=False, home=(str(place / "home"), home))
        try:
            said = _run_isolated(place, script, words, environment, tools)
        except NotIsolated as refusal:
            error, facts = refusal.args
            raise config_error(
                "import-script", "import", typed, error=error, **facts
            ) from None
        return _result(said, isolated=True)


class NotIsolated(Exception):
    """The machine cannot isolate a script. Arguments: the name of the error's text, and its facts."""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "user"


def _search_path() -> str:
    """Return the folders of programs: those of PATH, and those that a user's PATH may lack."""
    return f"{os.environ.get('PATH', '')}:/usr/bin:/bin:/usr/sbin:/sbin"


def _found(*names: str) -> dict[str, str]:
    """Return program -> path, for each program that the machine has."""
    folders = _search_path()
    paths = {name: shutil.which(name, path=folders) for name in names}
    return {name: path for name, path in paths.items() if path is not None}


def project_of(script: Path) -> Path:
    """Return the folder of the project that a script belongs to; without one, the folder of the script.

    The user's home, and folders above it, are no projects, whatever files are in them.
    """
    for folder in script.parents:
        if _holds_home(folder):
            break
        if any((folder / mark).exists() for mark in _PROJECT):
            return folder
    return script.parent


def _holds_home(folder: Path) -> bool:
    """Return whether the user's home is in a folder, or is this folder."""
    home = Path(os.path.expanduser("~"))
    return any(folder in (path, *path.parents) for path in (home, home.resolve()))


def _folders_of_others(project: Path) -> list[str]:
    """Return the folders below a project that have another owner or group, as paths relative to the project.

    The namespaces have one user and one group. An overlay cannot copy a folder of any other, so a script could write no
    file in it. Hidden folders are left out.
    """
    own = (os.geteuid(), os.getegid())
    found: list[str] = []
    for folder, names, _ in os.walk(project):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in names:
            path = Path(folder, name)
            facts = path.lstat()
            if not path.is_symlink() and (facts.st_uid, facts.st_gid) != own:
                found.append(str(path.relative_to(project)))
        if len(found) >= _MOST_FOLDERS:
            break
    return found[:_MOST_FOLDERS]


def _start(script: Path, project: Path) -> Path:
    """Return the folder in which a script is run: the working directory if it is in the project, else the project."""
    here = Path.cwd()
    if here == project or project in here.parents:
        return here
    return project


def _write_programs(place: Path, bash: str, log: str, nothing: Sequence[str]) -> None:
    """Write the stubs into the folder `bin`, and what bash reads before each script.

    `place`: the folder of all files. `bash`: path of bash for the stubs. `log`: folder of the records. `nothing`:
    programs that do nothing.
    """
    folder = place / "bin"
    folder.mkdir()
    facts = {"bash": bash, "log": log, "most": _MOST_LAUNCHES}
    programs = dict.fromkeys(LAUNCHERS, _STUB)
    programs |= dict.fromkeys(("sleep", *nothing), _NOTHING)
    programs["sudo"] = _PASSES
    for program, text in programs.items():
        file = folder / program
        file.write_text(text.format(**facts), encoding="utf-8")
        file.chmod(0o755)
    before = _BEFORE.format(**facts)
    (place / "before").write_text(before, encoding="utf-8")


def _write_run(
    place: Path,
    script: Path,
    words: Sequence[str],
    bash: str,
    log: str,
    limits: str,
    after: str = "",
) -> Path:
    """Write _RUN for a script into the folder `place`, and return the file.

    `words`: arguments of the script. `bash`, `log`: as for `_write_programs`. `limits`: commands that limit it.
    `after`: command that is run after the script.
    """
    text = _RUN.format(
        folder=shlex.quote(str(_start(script, project_of(script)))),
        limits=limits,
        seconds=SECONDS,
        bash=bash,
        script=shlex.quote(str(script)),
        words=shlex.join(words),
        log=log,
        after=after,
    )
    run = place / "run"
    run.write_text(text, encoding="utf-8")
    return run


def _run_trusted(
    place: Path,
    script: Path,
    words: Sequence[str],
    environment: dict[str, str],
    tools: Mapping[str, str],
) -> bytes:
    """Run a script without isolation, and return what _RUN prints."""
    log = place / "log"
    log.mkdir()
    (place / "home").mkdir()
    _write_programs(place, tools["bash"], str(log), _WRITING)
    for tool, path in tools.items():
        if tool not in _WRITING:
            (place / "bin" / tool).symlink_to(path)
    (place / "bin" / "sh").symlink_to(tools["bash"])
    run = _write_run(place, script, words, tools["bash"], str(log), _LIMITS)
    environment |= {"HOME": str(place / "home"), "BASH_ENV": str(place / "before")}
    command = [tools["bash"], str(run)]
    return _answer(command, str(place / "bin"), environment)[0]


def _run_isolated(
    place: Path,
    script: Path,
    words: Sequence[str],
    environment: dict[str, str],
    tools: Mapping[str, str],
) -> bytes:
    """Run a script in namespaces of its own, and return what _RUN prints."""
    system = _found(*_SYSTEM)
    absent = [name for name in _SYSTEM if name not in system and name != "setpriv"]
    if absent:
        raise NotIsolated("isolation-programs", {"programs": ", ".join(absent)})
    _write_programs(place, "/usr/bin/bash", "/.log", ())
    (place / "root").mkdir()
    (place / "bin" / "sh").write_bytes(Path(tools["bash"]).read_bytes())
    (place / "bin" / "sh").chmod(0o755)
    limits = f"{_LIMITS}; {_LIMITS_ISOLATED}"
    run = _write_run(
        place, script, words, "/usr/bin/bash", "/.log", limits, _END_OTHERS
    )
    variables = {"PATH": "/usr/bin", "BASH_ENV": "/.before"} | environment
    inner = ["/usr/bin/env", "-i", *(f"{k}={v}" for k, v in variables.items())]
    if "setpriv" in system:
        inner += ["/.system/setpriv", "--no-new-privs"]
        inner += ["--bounding-set=-all", "--inh-caps=-all"]
    project = project_of(script)
    alone = _holds_home(project)
    folders = [] if alone else _folders_of_others(project)
    owned = place / "owned"
    owned.write_bytes(b"".join(os.fsencode(folder) + b"\0" for folder in folders))
    setup = _ISOLATE.format(
        root=place / "root",
        bin=place / "bin",
        before=place / "before",
        run=run,
        copies=shlex.join(tools.values()),
        system=shlex.join(system.values()),
        user=shlex.quote(environment["USER"]),
        home=shlex.quote(environment["HOME"]),
        project=shlex.quote(str(project)),
        alone=shlex.quote(str(script) if alone else ""),
        owned=owned,
        libraries=" ".join(_LIBRARIES),
        command=shlex.join([*inner, "/usr/bin/bash", "/.run"]),
    )
    (place / "setup").write_text(setup, encoding="utf-8")
    command = [system["unshare"], "--map-root-user"]
    command += [f"--{name}" for name in _NAMESPACES]
    command += [tools["bash"], str(place / "setup")]
    said, error = _answer(command, _search_path())
    if _END not in said:
        raise _refusal(error.decode(errors="replace"))
    return said


def _refusal(said: str) -> NotIsolated:
    """Return why a script could not be isolated. `said`: error output of the programs that set up the namespaces."""
    for name, refusing, permitting in _SETTINGS:
        value = _setting(name)
        if value == refusing:
            facts = {"name": name, "value": value, "permitting": permitting}
            return NotIsolated("isolation-setting", facts)
    lines = [line.strip() for line in said.split("\n") if line.strip()]
    # `mount` adds a line about the log of the kernel
    lines = [line for line in lines if "dmesg" not in line]
    reason = lines[-1] if lines else ""
    if any(text in reason for text in _REFUSED):
        return NotIsolated("isolation-refused", {"reason": reason})
    return NotIsolated("no-isolation", {"reason": reason or "no reason is given"})


def _setting(name: str) -> str:
    """Return the value of a setting of Linux, such as `user.max_user_namespaces`; "" if there is none."""
    try:
        file = Path("/proc/sys", *name.split("."))
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _answer(
    command: Sequence[str], path: str, environment: Mapping[str, str] | None = None
) -> tuple[bytes, bytes]:
    """Run a command and return its output and its error output. If it takes too long, its processes are ended.

    `path`: the programs that it finds. `environment`: its other environment variables.
    """
    with subprocess.Popen(
        command,
        env={**(environment or {}), "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=SECONDS + _SLACK)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()
        finally:
            # Ctrl-C ends the script as well, which is in a session of its own
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _result(said: bytes, *, isolated: bool, home: tuple[str, str] = ("", "")) -> Ran:
    """Return the result that the output of _RUN describes.

    `isolated`: whether the script was isolated. `home`: (empty folder that was HOME of the script, HOME of the user).
    """
    launches: list[Launch] = []
    unknown: tuple[str, ...] = ()
    errors = ""
    for name, content in _files(said):
        if name.startswith("launch."):
            folder, program, *words = content.decode(errors="replace").split("\0")[:-1]
            if home[0]:
                words = [word.replace(*home) for word in words]
            launches.append(Launch(program=program, words=tuple(words), folder=folder))
        elif name == "unknown":
            unknown = tuple(dict.fromkeys(content.decode(errors="replace").split("\n")))
        elif name == "said":
            errors = content.decode(errors="replace")
    code = said.rpartition(_END)[2].strip()
    return Ran(
        launches=tuple(launches),
        unknown=tuple(filter(None, unknown)),
        code=int(code) if code.isdigit() else 1,
        said=errors.strip(),
        isolated=isolated,
    )


def _files(said: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) for each file that the output of _RUN has."""
    at = 0
    while (end := said.find(b"\n", at)) >= 0:
        name, _, size = said[at:end].decode(errors="replace").partition(" ")
        if name == "code" or not size.strip().isdigit():
            return
        at = end + 1 + int(size)
        yield name, said[end + 1 : at]
