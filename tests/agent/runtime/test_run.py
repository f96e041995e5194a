import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpufleet_agent.probes import PROBES


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_it_measures_and_ends_cleanly_when_told(kit: Any) -> None:
    agent = kit.start(kit.config())
    kit.wait_for(lambda: len({row["ts_us"] for row in kit.spool.rows("gpu")}) >= 3)
    children = [agent.child()]
    assert agent.end() == 0
    assert alive(children) == []
    assert "Traceback" not in agent.errors()
    kinds = kit.spool.kinds()
    assert (kinds[0], kinds[-1], len(kinds)) == ("agent_start", "agent_stop", 2)
    runs = kit.spool.rows("agent")
    assert {row["probe"] for row in runs} == {*PROBES, "agent"}
    assert all(row["ok"] is True and row["error"] == "" for row in runs)
    sweeps = {row["ts_us"] for row in kit.spool.rows("gpu")}
    marks = {row["ts_us"]: row["rows"] for row in runs if row["probe"] == "gpu"}
    assert marks == dict.fromkeys(sweeps, 8)  # a mark for each sweep, at the same time
    own = [row for row in runs if row["probe"] == "agent"]
    assert all(row["pss_bytes"] > 1 << 20 and row["cpu_s_total"] > 0 for row in own)
    inventory = next(body.inventory for body in kit.spool.bodies() if body.HasField("inventory"))
    assert inventory.complete
    assert sum(item.entity.startswith("gpu:GPU-") for item in inventory.items) == 8


def test_what_was_before_is_told_at_the_start(kit: Any) -> None:
    config = kit.config()
    for clean in (True, False, True):
        agent = kit.start(config)
        kit.wait_for(agent.children)
        if clean:
            assert agent.end() == 0
        else:
            agent.process.kill()
            agent.process.wait(90)
    stopped = [json.loads(event.detail)["stopped"] for event in kit.spool.events("agent_start")]
    assert stopped == ["first start", "clean", "unclean"]
    assert kit.spool.events("reboot") == []


def test_a_reboot_is_told_once_with_both_ids(kit: Any) -> None:
    root = kit.tmp / "root"
    boot = root / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    config = kit.config(top=f'root = "{root}"\ndriver = "none"', faults=None)
    for text in ("aaaa", "bbbb", "bbbb"):
        boot.write_text(text + "\n")
        agent = kit.start(config)
        kit.wait_for(agent.children)
        assert agent.end() == 0
    (event,) = kit.spool.events("reboot")
    assert json.loads(event.detail) == {"before": "aaaa", "now": "bbbb"}
    assert {body.boot_id for body in kit.spool.bodies()} == {"aaaa", "bbbb"}


@pytest.mark.parametrize("hung", [False, True])
def test_a_killed_supervisor_leaves_no_child_behind(kit: Any, hung: bool) -> None:
    agent = kit.start(kit.config(tables="[sampler]\ndeadline_s = 60\n", faults=kit.hang() if hung else ""))
    kit.wait_for(lambda: kit.spool.rows("host"))
    children = [agent.child()]
    agent.process.kill()
    agent.process.wait(90)
    kit.wait_for(lambda: not alive(children))
    assert alive(children) == []


def test_READY_and_STATUS_do_not_wait_for_a_driver(kit: Any) -> None:
    systemd = kit.systemd()
    agent = kit.start(kit.config(faults=kit.hang(gpu=0)), NOTIFY_SOCKET=str(systemd.path))
    kit.wait_for(lambda: systemd.count("READY=1"))
    assert systemd.count("READY=1") == 1
    kit.wait_for(lambda: kit.spool.events("driver_hung"))
    kit.wait_for(lambda: systemd.count("STATUS=7/8 GPUs"))
    ready = next(at for at, line in systemd.heard if "READY=1" in line)
    hung = next(at for at, line in systemd.heard if "7/8 GPUs" in line)
    assert ready < hung
    environment = agent.child().environ()
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & environment.keys()
    assert agent.end() == 0
    assert systemd.count("STOPPING=1") == 1


@pytest.mark.parametrize("watchdog_s", [0.5, 30.0])
def test_W01_pings_come_at_less_than_half_the_limit_also_while_a_driver_hangs(
    kit: Any, watchdog_s: float
) -> None:
    systemd = kit.systemd()
    usec = str(int(watchdog_s * 1e6))
    agent = kit.start(kit.config(faults=kit.hang(gpu=0)), NOTIFY_SOCKET=str(systemd.path), WATCHDOG_USEC=usec)
    kit.wait_for(lambda: kit.spool.events("driver_hung"))
    kit.wait_for(lambda: systemd.count("WATCHDOG=1") >= 8)
    assert agent.end() == 0
    pings = [at for at, line in systemd.listen() if "WATCHDOG=1" in line]
    gaps = sorted(after - before for before, after in itertools.pairwise(pings))
    assert gaps[len(gaps) // 2] < watchdog_s / 2


def test_W01_without_a_watchdog_there_are_no_pings(kit: Any) -> None:
    systemd = kit.systemd()
    agent = kit.start(kit.config(), NOTIFY_SOCKET=str(systemd.path))
    kit.wait_for(lambda: len(kit.spool.rows("gpu")) > 16)
    assert agent.end() == 0
    assert systemd.count("READY=1") == 1
    assert systemd.count("WATCHDOG=1") == 0


def test_W01_a_watchdog_of_another_process_is_none_of_ours(kit: Any) -> None:
    systemd = kit.systemd()
    agent = kit.start(kit.config(), NOTIFY_SOCKET=str(systemd.path), WATCHDOG_USEC="500000", WATCHDOG_PID="1")
    kit.wait_for(lambda: len(kit.spool.rows("gpu")) > 8)
    assert agent.end() == 0
    assert systemd.count("WATCHDOG=1") == 0


def test_an_event_does_not_wait_for_its_turn(kit: Any) -> None:
    config = kit.config(faults=kit.hang(gpu=3, at=1.5))
    config.write_text(config.read_text().replace("seal_s = 0.2", "seal_s = 300"))
    agent = kit.start(config)
    kit.wait_for(lambda: kit.spool.events("driver_hung"))
    assert agent.end() == 0
    assert kit.spool.kinds() == ["agent_start", "driver_hung", "agent_stop"]


def refused(kit: Any, config: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gpufleet_agent.main", "run", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("fleet-agent: ")
    return done.stderr


def test_a_wrong_configuration_is_one_line(kit: Any) -> None:
    assert "unknown key colector" in refused(kit, kit.config(top='colector = "x:1"'))
    assert "no-such.toml: cannot read" in refused(kit, kit.tmp / "no-such.toml")
    config = kit.config()
    config.write_text(config.read_text().replace('node = "gpu-a01"', 'node = "gpu-zz"'))
    assert "simulated.node: no node 'gpu-zz'" in refused(kit, config)
    assert not kit.state.exists()


def test_a_certificate_that_cannot_be_read_is_one_line(kit: Any) -> None:
    tls = "[tls]\n" + "".join(f'{key} = "/no/such/{key}.pem"\n' for key in ("ca", "cert", "key"))
    config = kit.config(tables=tls)
    assert f"{config}: tls.ca: cannot read /no/such/ca.pem" in refused(kit, config)


def test_a_file_that_is_no_certificate_is_one_line(kit: Any) -> None:
    for name in ("ca", "cert", "key"):
        (kit.tmp / f"{name}.pem").write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    tls = "[tls]\n" + "".join(f'{name} = "{kit.tmp}/{name}.pem"\n' for name in ("ca", "cert", "key"))
    config = kit.config(tables=tls)
    assert f"{config}: tls.ca: {kit.tmp}/ca.pem is not a PEM certificate" in refused(kit, config)


def test_plain_text_to_another_machine_is_refused_unless_wanted(kit: Any) -> None:
    config = kit.config()
    config.write_text(config.read_text().replace("127.0.0.1:1", "192.0.2.1:7443"))
    assert f"{config}: collector: 192.0.2.1:7443 is not loopback" in refused(kit, config)


def test_a_state_directory_that_cannot_be_written_is_one_line(kit: Any) -> None:
    (kit.tmp / "state").write_text("a file")
    said = refused(kit, kit.config())
    assert "state_dir: " in said
    assert str(kit.tmp / "state") in said


def test_a_spool_held_by_another_agent_names_its_process(kit: Any) -> None:
    config = kit.config()
    agent = kit.start(config)
    kit.wait_for(lambda: kit.spool.rows("host"))
    said = refused(kit, config)
    assert f"pid {agent.pid}" in said
    assert "stop it first" in said
    assert agent.end() == 0


def test_killing_the_sampler_loses_no_row_that_was_sealed(kit: Any) -> None:
    agent = kit.start(kit.config())
    kit.wait_for(lambda: kit.spool.rows("gpu"))
    before = {row["ts_us"] for row in kit.spool.rows("gpu")}
    for _ in range(3):
        child = agent.child()
        child.kill()
        kit.wait_for(lambda gone=child: [one for one in agent.children() if one != gone])
    kit.wait_for(lambda: len({row["ts_us"] for row in kit.spool.rows("gpu")} - before) > 3)
    assert agent.end() == 0
    assert before <= {row["ts_us"] for row in kit.spool.rows("gpu")}
    assert len(kit.spool.events("sampler_restarted") + kit.spool.events("driver_crashed")) == 3
    stamps = [(row["ts_us"], row["pci"]) for row in kit.spool.rows("gpu")]
    assert len(stamps) == len(set(stamps))


def test_check_says_ok_or_why_not(kit: Any) -> None:
    command = [sys.executable, "-m", "gpufleet_agent.main", "check", "--config"]
    good = subprocess.run([*command, str(kit.config())], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    assert "node gpu-a01" in good.stdout
    bad = subprocess.run(
        [*command, str(kit.config(top="node = 3"))], capture_output=True, text=True, check=False
    )
    assert bad.returncode == 1
    assert "key node" in bad.stderr


def test_Ctrl_C_is_a_clean_stop_too(kit: Any) -> None:
    agent = kit.start(kit.config())
    kit.wait_for(lambda: kit.spool.rows("gpu"))
    for child in agent.children():
        child.send_signal(signal.SIGINT)  # a terminal sends it to everyone
    os.kill(agent.pid, signal.SIGINT)
    assert agent.process.wait(90) == 0
    assert kit.spool.kinds() == ["agent_start", "agent_stop"]


def test_it_is_ready_soon(kit: Any) -> None:
    systemd = kit.systemd()
    agent = kit.start(kit.config(), NOTIFY_SOCKET=str(systemd.path))
    kit.wait_for(lambda: systemd.count("READY=1"))
    assert systemd.heard[0][0] - agent.started < 20.0  # the budget is measured by the benchmark
    assert agent.end() == 0
    assert time.monotonic() - agent.started < 60.0
