"""What goes wrong at the prompt: one clear text and one exit code each, as JSON when JSON was asked for."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result

from gpufleet_cli.client import Client
from gpufleet_cli.main import fleet

Run = Callable[..., Result]


@pytest.fixture
def nobody() -> str:
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def mute() -> Iterator[socket.socket]:
    """Listens, and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        yield server


@pytest.fixture
def deaf(mute: socket.socket) -> str:
    """A port that takes connections and says nothing."""
    return f"127.0.0.1:{mute.getsockname()[1]}"


@pytest.fixture
def rude() -> Iterator[str]:
    """A port that speaks another protocol and hangs up."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(8)
    server.settimeout(0.1)
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            try:
                with server.accept()[0] as connection:
                    connection.sendall(b"220 mail.example.com ESMTP\r\n")
            except OSError:
                continue

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    done.set()
    thread.join()
    server.close()


def run(*words: str) -> Result:
    return CliRunner().invoke(fleet, list(words), prog_name="fleet")


VERBS = [
    ("status",),
    ("node",),
    ("gpu", "x"),
    ("incidents",),
    ("incidents", "show", "1"),
    ("incidents", "ack", "1"),
    ("incidents", "silence"),
    ("incidents", "report"),
    ("maintenance",),
    ("inventory",),
    ("inventory", "accept", "gpu-001"),
    ("sql", "select 1"),
    ("explain", "1"),
    ("version",),
]


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_an_absent_collector_is_3_and_says_where_and_what_to_check(
    nobody: str, words: tuple[str, ...]
) -> None:
    result = run("--server", nobody, *words)
    assert result.exit_code == 3
    assert result.stdout == ""
    assert f"cannot reach the collector at {nobody}" in result.stderr
    assert "GPUFLEET_SERVER" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_the_same_as_json_on_stdout(nobody: str, words: tuple[str, ...]) -> None:
    result = run("--server", nobody, *words, "-o", "json")
    assert result.exit_code == 3
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "unreachable"
    assert nobody in error["message"]
    assert error["hint"]
    assert result.stderr == ""


def test_a_collector_that_does_not_answer_is_3(deaf: str) -> None:
    result = run("--server", deaf, "--timeout", "0.5", "status")
    assert result.exit_code == 3
    assert deaf in result.stderr


def test_what_takes_its_time_is_given_it_and_says_so(deaf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An explanation of a node runs every rule: the usual five seconds are not enough."""
    given: list[float] = []
    document = Client.document

    def hurried(self: Client, call: object, request: object, least_timeout: float = 0.0) -> object:
        given.append(least_timeout)
        return document(self, call, request, 0.5)  # type: ignore[arg-type]

    monkeypatch.setattr(Client, "document", hurried)
    result = run("--server", deaf, "--timeout", "0.1", "explain", "gpu-001")
    assert result.exit_code == 3
    assert given == [30.0]
    assert "within 0.5 s" in result.stderr
    assert "--timeout 30," in result.stderr


def test_something_else_at_that_port_is_3(rude: str) -> None:
    result = run("--server", rude, "--timeout", "5", "status")
    assert result.exit_code == 3


def test_a_name_that_does_not_resolve_is_3() -> None:
    result = run("--server", "no-such-host.invalid:7443", "--insecure", "--timeout", "10", "status")
    assert result.exit_code == 3
    assert "no-such-host.invalid:7443" in result.stderr


def test_plain_text_to_another_machine_is_4() -> None:
    result = run("--server", "192.0.2.1:7443", "status")
    assert result.exit_code == 4
    assert "--ca, --cert and --key" in result.stderr
    assert (
        json.loads(run("--server", "192.0.2.1:7443", "status", "-o", "json").stdout)["error"]["code"]
        == "credentials"
    )


def test_a_missing_certificate_file_is_4(nobody: str) -> None:
    result = run(
        "--server", nobody, "--ca", "/nonexistent.pem", "--cert", "/x.pem", "--key", "/y.pem", "status"
    )
    assert result.exit_code == 4
    assert "/nonexistent.pem" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("nope",),
        ("status", "--nope"),
        ("status", "-o", "yaml"),
        ("gpu",),
        ("sql",),
        ("sql", ""),
        ("status", "--timeout", "0"),
        ("inventory", "accept", "gpu-[003-001]"),
        ("inventory", "accept", "gpu-[001"),
        ("inventory", "import", "/nonexistent.csv"),
    ],
    ids=" ".join,
)
def test_usage_is_2(words: tuple[str, ...]) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_usage_as_json() -> None:
    result = run("nope", "-o", "json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["code"] == "usage"


def test_ctrl_c_is_130(mute: socket.socket, deaf: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "gpufleet_cli.main", "--server", deaf, "--timeout", "60", "status"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        mute.settimeout(60)
        with mute.accept()[0]:  # it has started and waits for an answer
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(1.0)
            child.send_signal(2)
            _, complaint = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130
    assert b"Traceback" not in complaint


def test_help_needs_no_grpc() -> None:
    """`fleet --help` and completion stay quick: gRPC is loaded when a call is made."""
    code = (
        "import sys; from gpufleet_cli.main import fleet\n"
        "try: fleet.main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'grpc', 'google.protobuf', 'duckdb', 'numpy', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_verb_has_help() -> None:
    import click

    def walk(command: click.Command, words: list[str]) -> None:
        result = run(*words, "--help")
        assert result.exit_code == 0
        assert command.help, words
        if isinstance(command, click.Group):
            for name, child in command.commands.items():
                walk(child, [*words, name])

    walk(fleet, [])
