"""What is stored comes back as it was, whatever it holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_core.errors import StoreUnavailable
from crater_core.model.allocation import Allocation, AllocationStatus, DeviceGrant, Use
from crater_core.model.history import Event
from crater_core.model.node import ControlShare, Enforcement, GpuDevice, Node, PoolKind, SharingMode
from crater_core.model.past import PastUse
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.resources import Amounts, GpuRequest, Request
from crater_core.model.service import Service, ServiceStatus
from crater_core.model.task import HealthCheck, Mount, OnDisconnect, RetryPolicy, Task, TaskSpec, TaskStatus, TaskType
from crater_core.model.usage import UsageRecord
from crater_core.store.codec import decode, encode

_text = st.text(st.characters(codec="utf-8"), max_size=20)
_count = st.integers(0, 2**62)
_maybe = st.none() | _count
_names = st.dictionaries(_text, _text, max_size=3)
_reason = st.builds(Reason, st.sampled_from(ReasonCode), st.dictionaries(_text, _text | _count, max_size=3))
_amounts = st.builds(Amounts, _count, _count, _count, _count, _count)
_gpu = st.builds(GpuRequest, _count, _count, _count, st.booleans(), st.tuples(_text))
_request = st.builds(Request, _count, _count, _count, st.none() | _gpu, _count)
_use = st.builds(Use, _count, _count, _count, _count, _count, _count)
_grant = st.builds(DeviceGrant, _text, _count, _count, _count, st.sampled_from(SharingMode), st.booleans())
_spec = st.builds(
    TaskSpec,
    name=_text,
    type=st.sampled_from(TaskType),
    command=st.lists(_text, max_size=3).map(tuple),
    image=st.none() | _text,
    env=_names,
    mounts=st.tuples(st.builds(Mount, _text, _text, st.booleans())),
    request=_request,
    members=_count,
    node_labels=_names,
    time_limit_ms=_maybe,
    retry=st.builds(RetryPolicy, _count, st.booleans(), st.booleans(), _count),
    on_disconnect=st.sampled_from(OnDisconnect),
    group=st.none() | _text,
    labels=_names,
    health=st.none() | st.builds(HealthCheck, _text, _count, _count, _count),
)
_task = st.builds(
    Task,
    id=_text,
    spec=_spec,
    status=st.sampled_from(TaskStatus),
    submitted_at_ms=_count,
    queued_at_ms=_count,
    reason=st.none() | _reason,
    exit_code=st.none() | st.integers(-255, 255),
    cancel_reason=st.none() | _reason,
    ready=st.booleans(),
)
_allocation = st.builds(
    Allocation,
    id=_text,
    task=_text,
    attempt=_count,
    member=_count,
    node=_text,
    token=_count,
    held=_amounts,
    grants=st.lists(_grant, max_size=2).map(tuple),
    ports=st.lists(_count, max_size=2).map(tuple),
    status=st.sampled_from(AllocationStatus),
    reason=st.none() | _reason,
    use=_use,
)
_device = st.builds(GpuDevice, _text, _count, _text, _text, _count, _text, st.sampled_from(SharingMode), links=st.tuples(_text))
_node = st.builds(
    Node,
    name=_text,
    labels=_names,
    pools=st.dictionaries(_text, st.sampled_from(PoolKind), max_size=2),
    capacity=_amounts,
    devices=st.lists(_device, max_size=2).map(tuple),
    control=st.builds(ControlShare, _count, _count),
    enforcement=st.sampled_from(Enforcement),
)
_limits = st.builds(Limits, _maybe, _maybe, _maybe, _maybe)
_values = st.one_of(
    _task,
    _allocation,
    _node,
    st.builds(QuotaPolicy, _text, st.tuples(_text, _text), _limits, _limits),
    st.builds(PastUse, _text, _count, st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 4)),
    st.builds(Service, _text, _spec, _count, _count, st.sampled_from(ServiceStatus)),
    st.builds(Event, _count, _text, _text, _text, st.none() | _reason, st.dictionaries(_text, _text | _count), st.none() | _text),
    st.builds(
        UsageRecord,
        _text,
        _text,
        _text,
        _text,
        _text,
        st.none() | _text,
        _text,
        _amounts,
        _count,
        _count,
        labels=st.tuples(st.tuples(_text, _text)),
    ),
)


@settings(max_examples=200, deadline=None)
@given(_values)
def test_a_value_survives_storage(value: Any) -> None:
    assert decode(type(value), encode(value)) == value


@pytest.mark.parametrize("data", [b"", b"{}", b'{"id": 1}', b"\xff\x00", b"null", b"[" * 100_000])
def test_damaged_bytes_are_said_to_be_damaged(data: bytes) -> None:
    with pytest.raises(StoreUnavailable, match="a stored Task cannot be read"):
        decode(Task, data)
