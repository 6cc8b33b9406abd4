"""`crater submit`: one task, from flags or from a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.text import Text

from crater_core.cli.arrays import submit_array
from crater_core.cli.session import FAILED, INTERRUPTED, Json, client, err, note, option, out, print_json
from crater_core.cli.show import clean, outcome_line
from crater_core.errors import InvalidRequest, NotFound, Unavailable

if TYPE_CHECKING:
    from crater_core.client import CraterClient
    from crater_core.wire.tasks import TaskView

COMPUTE, WHERE, WHEN, WHO, WHAT = "Compute", "Where", "When", "Who", "What it sees"
FILE_BYTES_MAX = 4 * 1024**2
Words = Annotated[list[str] | None, typer.Argument(help="The program and its arguments, after --.", metavar="-- COMMAND ARG...")]
Many = list[str] | None


def submit(
    command: Words = None,
    name: Annotated[str | None, option("NAME", "What people call it; else the program's name.")] = None,
    file: Annotated[
        str | None,
        option("PATH", "A task in YAML; - reads standard input. Flags win over it.", "--file", "-f"),
    ] = None,
    gpu: Annotated[str | None, option("COUNT", "2 is two whole GPUs; 0.25 is a share of one.", panel=COMPUTE)] = None,
    gpu_memory: Annotated[str | None, option("SIZE", "Memory of a shared GPU: 10GiB.", panel=COMPUTE)] = None,
    gpu_type: Annotated[Many, option("TYPE", "Accepted type, or MIG profile; several times: any of them.", panel=COMPUTE)] = None,
    cpu: Annotated[str | None, option("CORES", "Cores: 8, 0.5 or 500m. Default 1.", panel=COMPUTE)] = None,
    memory: Annotated[str | None, option("SIZE", "32GB, 512MiB. Default 512MiB.", panel=COMPUTE)] = None,
    disk: Annotated[str | None, option("SIZE", "Scratch space: 50GB.", panel=COMPUTE)] = None,
    time_limit: Annotated[str | None, option("TIME", "Stop it after 90s, 30m, 2h.", panel=COMPUTE)] = None,
    checkpoint_every: Annotated[
        str | None, option("TIME", "It saves its work so often; 0s: when told to stop.", panel=COMPUTE)
    ] = None,
    gpu_idle_stop: Annotated[str | None, option("TIME", "Stop it when its GPUs are unused for 30m.", panel=COMPUTE)] = None,
    gpu_visible_devices: Annotated[
        str | None, option("FORM", "CUDA_VISIBLE_DEVICES by uuid (default) or index.", panel=COMPUTE)
    ] = None,
    members: Annotated[str | None, option("COUNT", "A gang: 4, or 2-8 for as many as fit.", panel=COMPUTE)] = None,
    oom_factor: Annotated[float | None, option("FACTOR", "Out of memory: try again with 1.5 times more.", panel=COMPUTE)] = None,
    pool: Annotated[Many, option("POOL", "Pool to take from; several times.", panel=WHERE)] = None,
    node_label: Annotated[Many, option("KEY=VALUE", "Only nodes with KEY=VALUE.", panel=WHERE)] = None,
    spread: Annotated[str | None, option("HOW", "Members on different nodes: prefer, require.", panel=WHERE)] = None,
    anti_affinity: Annotated[str | None, option("HOW", "Away from its group: prefer, require.", panel=WHERE)] = None,
    array: Annotated[str | None, option("INDICES", "Many tasks: 0-99, 1,4,7-9; 0-99%10: 10 at once.", panel=WHEN)] = None,
    after: Annotated[Many, option("TASK", "Start when this has succeeded; several times.", panel=WHEN)] = None,
    after_any: Annotated[Many, option("TASK", "Start when this has ended, however.", panel=WHEN)] = None,
    after_failed: Annotated[Many, option("TASK", "Start when this has not succeeded.", panel=WHEN)] = None,
    project: Annotated[str | None, option("NAME", "Who is charged.", panel=WHO)] = None,
    quota: Annotated[str | None, option("POLICY", "Quota policy, by name.", panel=WHO)] = None,
    priority: Annotated[int | None, option("0..100", "0 last, 100 first, default 50.", panel=WHO)] = None,
    group: Annotated[str | None, option("NAME", "To list and cancel tasks together.", panel=WHO)] = None,
    label: Annotated[Many, option("KEY=VALUE", "Your own note, KEY=VALUE.", panel=WHO)] = None,
    env: Annotated[Many, option("NAME=VALUE", "NAME=VALUE, or NAME to pass on your own.", panel=WHAT)] = None,
    image: Annotated[str | None, option("IMAGE", "Run it in this container image.", panel=WHAT)] = None,
    mount: Annotated[Many, option("FROM:TO", "/data/x:/workspace/data, read-only; :rw at the end: writable.", panel=WHAT)] = None,
    output: Annotated[str | None, option("PATH", "Path whose content is its result.", panel=WHAT)] = None,
    shm: Annotated[str | None, option("SIZE", "Shared memory of the container, such as 8GiB.", panel=WHAT)] = None,
    workdir: Annotated[str | None, option("PATH", "Where it starts.", panel=WHAT)] = None,
    retries: Annotated[int | None, option("COUNT", "Try again this often when it fails.", min=0, max=99)] = None,
    key: Annotated[str | None, option("KEY", "Idempotency key: the same key gives the same task.")] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Say what would become of it; submit nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end; exit 1 unless it succeeded.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Like --wait, and show its output.")] = False,
    as_json: Json = False,
) -> None:
    """Submit a task.

    [bold]crater submit -- python train.py --epochs 3[/]

    [bold]crater submit --gpu 1 --cpu 8 --memory 32GB --follow -- python train.py[/]

    [bold]crater submit --gpu 0.25 --gpu-memory 10GiB --quota dev-quota -- python notebook.py[/]

    [bold]crater submit --image pytorch:2.4 --mount /data/cifar10:/workspace/data --wait[/]

    [bold]crater submit --file task.yaml --priority 80[/]

    [bold]crater submit --array 0-99%10 -- python sweep.py --part '{index}'[/]

    With --wait or --follow, Ctrl-C leaves the task running.
    """
    if as_json and follow:
        raise InvalidRequest("--json goes with --wait; --follow prints the task's own output")
    body = read_task_file(file) if file is not None else {}
    resources = _given(cpu=cpu, memory=memory, disk=disk, gpu=gpu, gpu_memory=gpu_memory, gpu_type=gpu_type)
    flags = _given(
        name=name,
        command=command,
        project=project,
        quota_policy=quota,
        priority=priority,
        group=group,
        image=image,
        output_path=output,
        working_dir=workdir,
        shared_memory=shm,
        time_limit=time_limit,
        checkpoint_every=checkpoint_every,
        gpu_idle_stop=gpu_idle_stop,
        gpu_visible_devices=gpu_visible_devices,
        pools=pool,
        mounts=[_mount(text) for text in mount or ()],
        spread=spread,
        anti_affinity=anti_affinity,
        after=_after(after, after_any, after_failed),
        **_members(members),
    )
    pairs = {"labels": _pairs(label, "label"), "node_labels": _pairs(node_label, "node-label"), "env": _environment(env)}
    body |= flags
    for field, more in {**pairs, "resources": resources, "retry": _retry(retries, oom_factor)}.items():
        if more:
            body[field] = {**_mapping(body.get(field, {}), field), **more}
    body.setdefault("name", _default_name(body))
    if dry:
        from crater_core.cli.whatif import dry_run

        dry_run([body], as_json)
        return
    if array is not None:
        if follow:
            raise InvalidRequest("--follow shows the output of one task; with --array use --wait", field="follow")
        submit_array(body, array, key, wait=wait, as_json=as_json)
        return
    _carry_out(body, key, wait=wait, follow=follow, as_json=as_json)


def register(app: typer.Typer) -> None:
    # What follows the first word that is no option belongs to the command, as with `env` and `docker run`.
    app.command("submit", context_settings={"allow_interspersed_args": False}, rich_help_panel="Tasks")(submit)


def _carry_out(body: dict[str, Any], key: str | None, *, wait: bool, follow: bool, as_json: bool) -> None:
    with client(patient=wait or follow) as crater:
        task = crater.submit(body, idempotency_key=key)
        if not (wait or follow):
            print_json(task) if as_json else out().print(task.id)
            if not as_json:
                Waiting()(task)
            return
        note(f"{task.id} ({task.name})")
        try:
            if follow:
                from crater_core.cli.logs import follow_output

                say_why_it_waits(crater, task)
                try:
                    follow_output(crater, task)
                except (NotFound, Unavailable) as error:
                    note(f"Its output cannot be read: {error.message}")
            ended = crater.wait(task.id, on_change=Waiting())
        except KeyboardInterrupt:
            detached(task.id)
            raise typer.Exit(INTERRUPTED) from None
    print_json(ended) if as_json else err().print(outcome_line(ended))
    if ended.status != "succeeded":
        raise typer.Exit(FAILED)


class Waiting:
    """Says once for each reason why a task waits."""

    def __init__(self) -> None:
        self._said = ""

    def __call__(self, task: TaskView) -> None:
        reason = task.reason if task.status == "queued" else None
        if reason is not None and reason.message != self._said and reason.code != "not_yet_looked_at":
            self._said = reason.message
            err().print(Text.assemble(("waiting: ", "yellow"), clean(reason.message), (f" {clean(reason.next_step)}", "bold")))


def say_why_it_waits(crater: CraterClient, task: TaskView) -> None:
    """Until it has left the queue."""
    waiting = Waiting()
    while task.status == "queued":
        waiting(task)
        task = crater.task(task.id, after=task.revision, wait_s=25.0)


def detached(task_id: str) -> None:
    err().print(f"\nDetached; the task goes on. `crater logs -f {task_id}` follows it, `crater cancel {task_id}` ends it.")


def read_task_file(path: str) -> dict[str, Any]:
    """The mapping in a YAML file. Raises InvalidRequest with what is wrong with it."""
    import yaml

    try:
        text = sys.stdin.read(FILE_BYTES_MAX + 1) if path == "-" else Path(path).read_text("utf-8")
        if len(text) > FILE_BYTES_MAX:
            raise InvalidRequest(f"{path} is over {FILE_BYTES_MAX // 1024**2} MiB", field="file")
        read: Any = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", field="file") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" (line {where.line + 1})" if where is not None else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise InvalidRequest(f"{path} is not YAML{line}: {problem}", field="file") from None
    if not isinstance(read, dict):
        raise InvalidRequest(f"{path} must hold names and values, as `name: train`", field="file")
    return cast(dict[str, Any], read)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def _mapping(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must hold names and values, found {value!r:.100}", field=field)
    return cast(dict[str, Any], value)


def _pairs(texts: Many, option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidRequest(f"--{option} must be KEY=VALUE, found {text!r}", field=option)
        found[name] = value
    return found


def _environment(texts: Many) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise InvalidRequest(
                f"--env {name}: there is no such variable here to pass on; give a value as {name}=VALUE", field="env"
            )
        found[name] = value if equals else os.environ[name]
    return found


def _mount(text: str) -> dict[str, Any]:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source or not target or mode not in ("", "ro", "rw"):
        raise InvalidRequest(f"--mount must be /ON/THE/NODE:/IN/THE/TASK or with :rw at the end, found {text!r}", field="mount")
    return {"source": source, "target": target, "read_only": mode != "rw"}


def _retry(retries: int | None, oom_factor: float | None) -> dict[str, Any]:
    again: dict[str, Any] = {} if retries is None else {"attempts": retries + 1, "on_failure": retries > 0}
    return again if oom_factor is None else {**again, "on_oom": {"factor": oom_factor}}


def _after(succeeded: Many, ended: Many, failed: Many) -> list[dict[str, str]]:
    pairs = (("succeeded", succeeded), ("ended", ended), ("failed", failed))
    return [{"task": task, "when": when} for when, tasks in pairs for task in tasks or ()]


def _members(text: str | None) -> dict[str, int]:
    if text is None:
        return {}
    least, dash, most = text.partition("-")
    if not (least.isdecimal() and (most.isdecimal() or not dash)):
        raise InvalidRequest(f"--members must be a number, or LEAST-MOST as 2-8, found {text!r}", field="members")
    return {"members_min": int(least), "members_max": int(most)} if dash else {"members": int(least)}


def _default_name(body: dict[str, Any]) -> str:
    """`train.py` for `python train.py`, else the program, else the image."""
    words = [str(word) for word in body.get("command") or ()]
    script = next((Path(word).name for word in words[1:] if word.endswith((".py", ".sh"))), None)
    return (script or (Path(words[0]).name if words else "") or str(body.get("image") or "") or "task")[:200]
