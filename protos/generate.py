"""Regenerate the checked-in protobuf code.

Run as `make protos`. The generators live in a throw-away environment of their own, pinned here: they must be
older than the runtime (gencode 6.31.1 loads on protobuf 6.31.1 to 7.x) and cannot share one with it.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

GENERATORS = ("grpcio-tools==1.76.0", "mypy-protobuf==3.7.0", "setuptools<81")
HERE = Path(__file__).resolve().parent


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
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
    print("generated", ", ".join(GENERATORS))
