"""Regenerate the checked-in protobuf code.

Run as `make protos`. The generators live in a throw-away environment of their own, pinned here: they must be
older than the runtime (gencode 6.31.1 loads on protobuf 6.31.1 to 7.x) and cannot share one with it.
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

GENERATORS = ("grpcio-tools==1.76.0", "mypy-protobuf==3.7.0", "setuptools<81")
HERE = Path(__file__).resolve().parent
STAMP = HERE / "gpufleet" / "v1" / "sources.sha256"
"""What the generated code was made from; a test compares it with the .proto files."""


def sources_sha256() -> str:
    """Hash of all .proto files in order of their names."""
    digest = hashlib.sha256()
    for path in sorted(HERE.glob("gpufleet/v1/*.proto")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def generate(out: Path) -> None:
    """Write the generated modules under `out`, which mirrors `protos/`."""
    sources = sorted(str(path.relative_to(HERE)) for path in HERE.glob("gpufleet/v1/*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", *GENERATORS], check=True)
        plugins = [f"--{name}_out={out}" for name in ("python", "grpc_python", "mypy", "mypy_grpc")]
        found = [
            f"--plugin=protoc-gen-{name}={python.parent / f'protoc-gen-{name}'}"
            for name in ("mypy", "mypy_grpc")
        ]
        subprocess.run(
            [python, "-m", "grpc_tools.protoc", "-I", HERE, *found, *plugins, *sources],
            check=True,
            cwd=HERE,
        )


if __name__ == "__main__":
    generate(HERE)
    STAMP.write_text(sources_sha256() + "\n")
    print("generated", ", ".join(GENERATORS))
