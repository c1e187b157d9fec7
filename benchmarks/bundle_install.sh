#!/usr/bin/env bash
# Unpacks the archives that lie beside this script, whole or in parts, into a folder of packages. Needs no network, no pip
# and no rights; packages that are there already are written over.
#     bash install.sh TARGET [PYTHON]        (then PYTHONPATH=TARGET)
# Exit codes: 0 all of them are unpacked; 2 not, and why.
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: bash install.sh TARGET [PYTHON]" >&2; exit 2; }
exec "${2:-python3}" - "$(dirname "$(realpath "$0")")" "$1" <<'END'
import concurrent.futures
import hashlib
import json
import os
import sys
import tempfile
import time
import zipfile
from pathlib import Path

here, target = Path(sys.argv[1]), Path(sys.argv[2])


def give_up(why):
    sys.exit(print(f"install.sh: {why}", file=sys.stderr) or 2)


def joined(parts, whole):
    """Write the parts one after the other, each as it was when it was made."""
    for part in parts:
        file = here / part["file"]
        if not file.exists():
            give_up(f"{part['file']} is missing in {here}: all parts have to lie beside this script")
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != part["sha256"]:
            give_up(f"{file} is damaged, or of another bundle than its note: carry it again")
        whole.write(content)
    whole.flush()


def unpack(archive, members):
    with zipfile.ZipFile(archive) as opened:
        for member in members:
            made = opened.extract(member, target)
            if member.external_attr >> 16 & 0o111:
                os.chmod(made, 0o755)


try:
    import lzma  # noqa: F401
except ImportError:
    give_up(f"{sys.executable} has no module lzma, by which large files are packed: name another Python")
notes = sorted(here.glob("*.json"))
if not notes:
    give_up(f"no bundle lies in {here}: its note NAME.json has to lie beside the parts")
for note in notes:
    began, told = time.monotonic(), json.loads(note.read_text())
    running = "{}.{}".format(*sys.version_info)
    if told["python"] != running:
        give_up(f"{note.stem} is for Python {told['python']}; {sys.executable} is {running}")
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target) as whole:
        joined(told["parts"], whole)
        with zipfile.ZipFile(whole.name) as opened:
            # The largest first, so that no thread is left with one of them.
            members = sorted(opened.infolist(), key=lambda member: -member.file_size)
        # All folders before the threads: two of them would make the same one at once.
        for folder in {(target / member.filename).parent for member in members}:
            folder.mkdir(parents=True, exist_ok=True)
        threads = min(8, os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(unpack, whole.name, members[at::threads]) for at in range(threads)]:
                done.result()
    print(f"install.sh: {note.stem}, {len(members)} files in {time.monotonic() - began:.1f} s", flush=True)
print(f"install.sh: ready        (PYTHONPATH={target.resolve()})")
END
