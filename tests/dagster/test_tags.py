"""What may be asked for in tags, how layers are merged, and what is said of a mistake."""

from __future__ import annotations

import inspect
import json
import os
import random

import pytest
from dagster import DagsterInvalidDefinitionError

from crater_core.errors import InvalidRequest
from crater_core.model.resources import GpuRequest
from crater_core.wire.resources import Resources
from crater_core.wire.tasks import TaskSubmission
from crater_dagster import crater_tags
from crater_dagster.options import from_tags, merge, of_one_process, submission
from crater_dagster.payload import VARIABLE, pack, unpack


def test_tags_are_texts_and_come_back_as_the_same_options():
    tags = crater_tags(gpu=0.25, gpu_memory="10GiB", cpu=2, pool="gpu-pool", priority=70, time_limit="2h", env={"A": "1"})
    assert all(isinstance(value, str) for value in tags.values())
    assert json.loads(tags["crater/resources"]) == {"cpu": 2, "gpu": 0.25, "gpu_memory": "10GiB"}
    assert from_tags(tags) == {
        "resources": {"cpu": 2, "gpu": 0.25, "gpu_memory": "10GiB"},
        "pools": ["gpu-pool"],
        "priority": 70,
        "time_limit": "2h",
        "env": {"A": "1"},
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"gpu": 1.5}, "gpu must be a whole number or below 1"),
        ({"memory": "4 parsecs"}, "memory: size has an unknown unit 'parsecs'"),
        ({"priority": 200}, "priority: Input should be less than or equal to 100 (found 200)"),
        ({"gpu_type": "a100"}, "gpu_type and gpu_devices need gpu or gpu_memory"),
        ({"gpu": 2, "gpu_type": "a100 or 3g.40gb"}, "gpu: 2 could be a card and a slice"),
        ({"mig_profile": "3g", "gpu": 1}, "mig_profile: String should match pattern"),
        ({"pool": "a b"}, "pool.0: String should match pattern"),
        ({"time_limit": -3}, "time_limit: duration must not be negative"),
        ({"members": 0}, "members: Input should be greater than or equal to 1 (found 0)"),
        ({"members_min": 4, "members_max": 2}, "members_min (4) must not be above members_max (2)"),
        ({"spread": "far"}, "spread: Input should be 'no', 'prefer' or 'require' (found 'far')"),
        ({"anti_affinity": "far"}, "anti_affinity: Input should be"),
        ({"on_disconnect": "wait"}, "on_disconnect: Input should be 'stop' or 'keep' (found 'wait')"),
        ({"data_bytes": {"n1": "4 parsecs"}}, "data_bytes.n1: size has an unknown unit 'parsecs'"),
        ({"prefer_labels": {"disk": "x" * 1001}}, "prefer_labels.disk: "),
        ({"on_oom": 1.0}, "on_oom.factor: Input should be greater than or equal to 1050"),
        ({"on_oom": {"more": 2}}, "on_oom.more: "),
        ({"ports": -1}, "ports: Input should be greater than or equal to 0 (found -1)"),
        ({"run_on": "moon"}, "run_on must be one of control, compute"),
        ({"env": {"CRATER_NODE": "x"}}, "names that start with CRATER_ are set by the agent"),
    ],
)
def test_a_mistake_is_told_where_the_tags_are_written(arguments: dict[str, object], said: str):
    with pytest.raises(DagsterInvalidDefinitionError, match="crater_tags: ") as error:
        crater_tags(**arguments)  # type: ignore[arg-type]
    assert said in str(error.value)


ELSEWHERE = {
    "name": "the step's key",
    "type": "batch, or training for a program with GPUs",
    "command": "the worker, or the program given to Pipes",
    "warm_preload": "the code location's module; `warm` is the option",
    "group": "the run",
    "after": "what the graph says",
    "retry": "Dagster's retry policy; on_oom is the scheduler's part",
    "output_path": "what the step returns, by its IO manager",
}


def test_every_field_of_a_task_can_be_asked_for_or_has_its_place_elsewhere():
    arguments = set(inspect.signature(crater_tags).parameters) - {"pool"} | {"pools"}
    amounts = set(Resources.model_fields)
    own = {"python", "run_on", "on_oom"}
    fields = {name for name in TaskSubmission.model_fields if name not in ELSEWHERE and name != "resources"}
    assert arguments - amounts - own == fields


def test_further_wishes_become_those_of_the_task():
    tags = crater_tags(
        members=2,
        spread="require",
        prefer_labels={"disk": "nvme"},
        data_bytes={"n1": "4GiB"},
        labels={"team": "vision"},
        on_oom={"factor": 2, "memory_max": "8GiB"},
        ports=1,
    )
    asked = submission(from_tags(tags), name="n", command=("true",), labels={"dagster/job": "j"})
    assert (asked.members, asked.spread, asked.prefer_labels, asked.ports) == (2, "require", {"disk": "nvme"}, 1)
    assert asked.data_bytes == {"n1": 4 * 1024**3}
    assert asked.labels == {"team": "vision", "dagster/job": "j"}
    assert asked.retry.on_oom is not None
    assert (asked.retry.on_oom.factor, asked.retry.on_oom.memory_max) == (2000, 8 * 1024**3)
    assert submission(of_one_process(from_tags(tags)), name="n", command=("true",)).members == 1


def test_a_card_or_a_slice_is_one_wish_and_a_layers_default_type_gives_way():
    tags = crater_tags(gpu=1, gpu_type="a100 or 3g.40gb")
    asked = submission(from_tags(tags), name="n", command=("true",)).resources.to_request().gpu
    assert asked == GpuRequest(1, types=("3g.40gb", "a100"))
    merged = merge({"resources": {"gpu": 0.5, "gpu_type": "h100"}}, from_tags(crater_tags(mig_profile="any")))
    asked = submission(merged, name="n", command=("true",)).resources.to_request().gpu
    assert asked == GpuRequest(1, types=("h100",), mig_profile="any")


def test_a_number_that_is_none_is_named():
    with pytest.raises(InvalidRequest, match="crater/members must be a whole number, found 'two'"):
        from_tags({"crater/members": "two"})


def test_an_unknown_tag_is_named():
    with pytest.raises(InvalidRequest, match="crater/recources: no such tag"):
        from_tags({"crater/recources": "{}"})


def test_a_tag_that_is_no_json_is_named():
    with pytest.raises(InvalidRequest, match="crater/resources must be an object in JSON"):
        from_tags({"crater/resources": "gpu=1"})


def test_the_plug_ins_own_notes_on_a_run_ask_for_nothing():
    assert from_tags({"crater/failure_reason": "oom", "crater/failed_step": "a", "dagster/priority": "3"}) == {}


def test_a_higher_layer_wins_resource_by_resource():
    low = {"project": "a", "resources": {"cpu": 1, "memory": "1GiB"}, "env": {"A": "1", "B": "1"}}
    high = {"resources": {"memory": "2GiB"}, "env": {"B": "2"}, "priority": None}
    assert merge(low, high) == {"project": "a", "resources": {"cpu": 1, "memory": "2GiB"}, "env": {"A": "1", "B": "2"}}


def test_a_higher_layers_gpus_replace_a_lower_layers_share():
    low = {"resources": {"gpu_memory": "10GiB", "gpu_type": ["a100"]}}
    assert merge(low, {"resources": {"gpu": 1}}) == {"resources": {"gpu": 1, "gpu_type": ["a100"]}}


def test_a_default_gpu_type_does_not_trouble_steps_without_a_gpu():
    assert merge({"resources": {"gpu_type": ["a100"]}}, {"resources": {"cpu": 1}}) == {"resources": {"cpu": 1}}


def test_a_submission_is_checked_as_a_whole():
    with pytest.raises(InvalidRequest, match="no such field"):
        submission({"projekt": "a"}, name="n", command=("true",))


def test_arguments_of_any_size_come_back_from_the_environment():
    content = {"run_id": "r", "known_state": random.Random(1).randbytes(200_000).hex()}
    packed = pack(content)
    assert len(packed) > 1
    assert all(len(value) <= 100_000 for value in packed.values())
    assert unpack(packed) == content


def test_more_than_a_process_can_be_given_is_refused():
    with pytest.raises(ValueError, match="after compression"):
        pack({"state": os.urandom(1_500_000).hex()})


@pytest.mark.parametrize("text", ["", "?", "aGVsbG8="])
def test_arguments_that_are_none_are_told(text: str):
    with pytest.raises(ValueError, match=VARIABLE):
        unpack({VARIABLE: text})
