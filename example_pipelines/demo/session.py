"""The three things one can ask for: run the loop once, keep the cluster up, take it down."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from crater_core.client import CraterClient
from crater_core.errors import CraterError
from crater_core.wire.tasks import TaskView
from example_pipelines.demo import cluster
from example_pipelines.demo.cluster import Demo, Ports
from example_pipelines.demo.loop import Dagster, Happened
from example_pipelines.demo.machine import Machine, look, port_is_free
from example_pipelines.demo.processes import DemoFailed, Interrupted, Processes, interruptible, stop_leftovers
from example_pipelines.demo.show import Screen, cores
from example_pipelines.digits.files import DigitsFiles

JOB = "digits_loop"
SERVICE = "digits"
RUN_TIMEOUT_S = 900.0
SETTLE_S = 15.0
LAST_LINES = 15
SIGNALLED = 128
UP_PORTS = Ports(scheduler=8080, scheduler_metrics=9090, gpu_agent=9091, cpu_agent=9092, dagster=3000)


def run_once(home: Path, screen: Screen) -> int:
    """`make demo`: up, the whole loop through Dagster, the summary, down. Answers the exit code."""
    with _mine(home), interruptible():
        return _guarded(home, screen, cluster.any_ports(), lambda demo, processes: _loop(demo, processes, screen))


def keep_up(home: Path, screen: Screen) -> int:
    """`make up`: the same cluster on the usual ports until Ctrl-C."""
    with _mine(home), interruptible():
        taken = [f"127.0.0.1:{port}" for port in _numbers(UP_PORTS) if not port_is_free(port)]
        if taken:
            screen.say("", f"In use by another program: {', '.join(taken)}. Stop it, or use `make demo`, which takes free ports.")
            return 1
        code = _guarded(home, screen, UP_PORTS, lambda demo, processes: _stay(demo, processes, screen), autoscale=True)
        return 0 if code >= SIGNALLED else code  # To be stopped is how it ends.


def take_down(home: Path, screen: Screen) -> int:
    """`make down`: stop what runs from this home, wherever it was started."""
    holder = _holder(home)
    if holder is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder, signal.SIGTERM)
        until = time.monotonic() + 60
        while _holder(home) is not None and time.monotonic() < until:
            time.sleep(0.1)
    left = stop_leftovers(home)
    if holder is None and not left:
        screen.say("", "Nothing of this demo is running.")
    else:
        screen.say("", "Stopped." if not left else f"Stopped; {len(left)} processes had to be ended one by one.")
    return 0


def _guarded(home: Path, screen: Screen, ports: Ports, work, *, autoscale: bool = False) -> int:
    """Do the work between the start and the stop of the processes; whatever happens, they are stopped."""
    left = stop_leftovers(home)
    if left:
        screen.say("", f"Stopped {len(left)} processes that an earlier demo had left.")
    demo = Demo(home, ports, look(), cluster.new_token(), autoscale)
    processes = Processes(home, demo.environment)
    code = 1
    try:
        cluster.write_files(demo)
        code = work(demo, processes)
    except Interrupted as interrupted:
        screen.calm()
        screen.say("", f"{interrupted}: stopping everything ...", "yellow")
        code = SIGNALLED + interrupted.number
    except (DemoFailed, CraterError, OSError, httpx.HTTPError) as error:
        screen.calm()
        screen.say("", f"The demo failed: {error}", "bold red")
        screen.say("", f"Logs: {demo.home}/logs")
    finally:
        screen.calm()
        _stop(screen, processes)
    return code


def _stop(screen: Screen, processes: Processes) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    screen.busy("stopping")
    killed = processes.stop_all()
    screen.calm()
    if killed:
        screen.say("", f"Had to be killed: {', '.join(killed)}", "yellow")
    screen.say("", "Everything is stopped.")


def _loop(demo: Demo, processes: Processes, screen: Screen) -> int:
    began_ms = time.time_ns() // 1_000_000
    _start(demo, processes, screen)
    with Dagster(demo.dagster_url) as dagster, _client(demo) as client:
        return _through_dagster(demo, processes, screen, dagster, client, began_ms)


def _through_dagster(
    demo: Demo, processes: Processes, screen: Screen, dagster: Dagster, client: CraterClient, began_ms: int
) -> int:
    run = dagster.launch(JOB)
    screen.say("run", f"{run[:8]} is launched: {demo.dagster_url}/runs/{run}")
    failures: list[Happened] = []

    def seen(happened: Happened) -> None:
        screen.event(happened)
        if happened.kind in ("ExecutionStepFailureEvent", "RunFailureEvent"):
            failures.append(happened)

    def wait() -> None:
        processes.must_all_run()
        time.sleep(0.25)

    try:
        status = dagster.follow(run, seen, wait, RUN_TIMEOUT_S)
    except Interrupted:
        with contextlib.suppress(DemoFailed, httpx.HTTPError):
            dagster.terminate(run)
        raise
    screen.calm()
    screen.say("run", status, "bold green" if status == "SUCCESS" else "bold red")
    tasks = _settled(client, began_ms)
    screen.table(tasks)
    if status != "SUCCESS":
        _explain_failure(client, screen, failures, tasks)
        return 1
    _results(demo, client, screen)
    _remove_services(client)
    screen.console.print(
        f"\nKeep it up: [bold]make up[/] (Dagster at http://127.0.0.1:{UP_PORTS.dagster}, scheduler at "
        f"http://127.0.0.1:{UP_PORTS.scheduler}, until Ctrl-C or [bold]make down[/])."
        f"\nIts data: {demo.home} (models, arrays and results in data/, logs in logs/)."
    )
    return 0


def _start(demo: Demo, processes: Processes, screen: Screen) -> None:
    screen.console.print(f"[bold]Crater for Dagster[/]: two nodes on this machine. {_about(demo.machine)}\n")
    cluster.start_dagster(demo, processes)  # Loads meanwhile; it does not need the cluster before the first run.
    screen.busy("starting the scheduler and two agents")
    cluster.start_cluster(demo, processes)
    screen.say("scheduler", f"ready at {demo.scheduler_url}")
    for node in sorted(_client(demo).nodes(), key=lambda node: node.name, reverse=True):
        gpus = "".join(f", 1 {device.model}" for device in node.devices)
        memory = f"{node.allocatable.memory_bytes / 10**9:g} GB"
        screen.say(node.name, f"{cores(node.allocatable.cpu_milli)}, {memory}{gpus}, limits {node.enforcement}")
    _remove_services(_client(demo))
    screen.busy("Dagster is loading the example")
    cluster.wait_for_dagster(demo, processes)
    screen.say("Dagster", f"ready at {demo.dagster_url} (open it while the demo runs)")


def _about(machine: Machine) -> str:
    size = f"{machine.cores} cores, {machine.memory_gb:.0f} GB"
    if machine.real_gpus:
        return f"It has {size} and {machine.real_gpus} GPU(s): the training runs on a share of the first."
    return f"It has {size} and no NVIDIA GPU: one is simulated, its share is accounted, and the training runs on the CPU."


def _stay(demo: Demo, processes: Processes, screen: Screen) -> int:
    _start(demo, processes, screen)
    screen.console.print(
        f"\nDagster:   {demo.dagster_url}  (Assets → Materialize all runs the loop)"
        f"\nScheduler: {demo.scheduler_url}  (its page asks for the token in {demo.home}/token; the API is described at /docs)"
        f"\nA shell that knows the way:  . {demo.home}/env && crater nodes"
        "\nCtrl-C, or `make down` in another terminal, stops everything."
    )
    screen.busy("up; Ctrl-C stops everything")
    while True:
        processes.must_all_run()
        time.sleep(0.5)


def _client(demo: Demo) -> CraterClient:
    return CraterClient(demo.scheduler_url, demo.token)


def _settled(client: CraterClient, began_ms: int) -> list[TaskView]:
    """The demo's tasks once the run's worker and its last step have left, which they do a moment after the run's end."""
    until = time.monotonic() + SETTLE_S
    while True:
        tasks = _tasks_since(client, began_ms)
        if all(task.ended or task.service for task in tasks) or time.monotonic() > until:
            return tasks
        time.sleep(0.1)


def _tasks_since(client: CraterClient, began_ms: int) -> list[TaskView]:
    found = [task for task in client.tasks(limit=200) if task.submitted_at_ms >= began_ms]
    return sorted(found, key=lambda task: (task.submitted_at_ms, task.id))


def _results(demo: Demo, client: CraterClient, screen: Screen) -> None:
    """The accuracy, and what each replica makes of the same image."""
    files = DigitsFiles(demo.data)
    evaluation = files.read_json("evaluation")
    accuracy = f"{evaluation['accuracy']:.4f} on {evaluation['test_images']} images that the training never saw"
    screen.console.print(f"\nAccuracy: [bold]{accuracy}[/]")
    test = files.read_arrays("features")
    image, truth = test["test_images"][0], int(test["test_labels"][0])
    for replica in client.service(SERVICE).replica_list:
        if not replica.ready or replica.url is None:
            continue
        answer = httpx.post(f"{replica.url}/predict", json={"images": [image.tolist()]}, timeout=30.0).raise_for_status().json()
        screen.console.print(
            f"Replica {replica.task} on {replica.node}: an image of a {truth} is a [bold]{answer['digits'][0]}[/] "
            f"({answer['probabilities'][0]:.1%}, model {answer['model']})"
        )


def _remove_services(client: CraterClient) -> None:
    for service in client.services():
        if not service.removed:
            client.remove_service(service.name)


def _explain_failure(client: CraterClient, screen: Screen, failures: list[Happened], tasks: list[TaskView]) -> None:
    """Each failed step with its reason, and the last lines of what it, and the programs it started, have written."""
    for failure in failures:
        screen.say(failure.step or "run", failure.error or failure.message, "red")
        of_step = [task for task in tasks if failure.step and task.labels.get("dagster/step_key") == failure.step]
        for task in of_step:
            lines = client.logs(task.id, "stderr").data.decode(errors="replace").splitlines()[-LAST_LINES:]
            if task.status != "succeeded" and lines:
                screen.console.print(f"--- last lines of {task.name}, task {task.id} ---", *lines, sep="\n", markup=False)


@contextlib.contextmanager
def _mine(home: Path) -> Iterator[None]:
    """Only one demo a home: a lock that the kernel gives back however this process ends."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (home / "lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoFailed(f"A demo is already running from {home} (process {_holder(home)}). `make down` stops it.") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _holder(home: Path) -> int | None:
    """The process that runs from this home, if one does."""
    try:
        with (home / "lock").open("r", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or 0) or None
            return None
    except (FileNotFoundError, ValueError):
        return None


def _numbers(ports: Ports) -> tuple[int, ...]:
    return (ports.scheduler, ports.scheduler_metrics, ports.gpu_agent, ports.cpu_agent, ports.dagster)
