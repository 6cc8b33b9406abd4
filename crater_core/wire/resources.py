"""Amounts as people write them ("10GiB", 0.25, "500m") and as Crater shows them."""

from __future__ import annotations

import re
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from crater_core.model.allocation import DeviceGrant
from crater_core.model.resources import MIG_PROFILE, Amounts, GpuRequest, Request, names_slice
from crater_core.model.units import MILLI, parse_bytes, parse_duration_ms, parse_mib, parse_milli
from crater_core.wire.base import Incoming, Outgoing

_TYPES = re.compile(r"\s*(?:,|\||\bor\b)\s*", re.IGNORECASE)
# Each kind is written back with its unit, so that a body which is parsed, sent and parsed again stays the same.
_NUMBER_OR_TEXT: dict[str, Any] = {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]}

Bytes = Annotated[
    int,
    BeforeValidator(lambda value: parse_bytes(value)),
    WithJsonSchema({**_NUMBER_OR_TEXT, "description": 'bytes, or a text with a unit: "10GB", "1.5GiB"'}),
]
Mib = Annotated[
    int,
    BeforeValidator(lambda value: parse_mib(value)),
    PlainSerializer(lambda count: f"{count}MiB", return_type=str),
    WithJsonSchema({**_NUMBER_OR_TEXT, "description": 'bytes, or a text with a unit: "10GiB"; rounded up to whole MiB'}),
]
Milli = Annotated[
    int,
    BeforeValidator(lambda value: parse_milli(value)),
    PlainSerializer(lambda count: f"{count}m", return_type=str),
    WithJsonSchema({**_NUMBER_OR_TEXT, "description": 'a number with at most three decimals: 2, 0.5, or "500m"'}),
]
DurationMs = Annotated[
    int,
    BeforeValidator(lambda value: parse_duration_ms(value)),
    PlainSerializer(lambda count: f"{count}ms", return_type=str),
    WithJsonSchema({**_NUMBER_OR_TEXT, "description": 'seconds, or a text with a unit: "500ms", "30s", "2m", "1.5h"'}),
]


class Resources(Incoming):
    """What one task (one member of a gang) needs.

    `gpu: 2` asks for two whole devices; `gpu: 0.25`, `gpu_memory: "10GiB"` or both ask for a share of one, or of
    `gpu_devices` of them.
    """

    cpu: Milli = Field(default=MILLI, description="cores")
    memory: Bytes = Field(default=512 * 1024**2)
    disk: Bytes = Field(default=0, description="scratch space")
    gpu: Milli = Field(default=0, description="whole devices, or the share of a device when it is below one")
    gpu_memory: Mib = Field(default=0, description="memory of each device that is shared")
    gpu_devices: int = Field(default=1, ge=1, le=64, description="how many devices to take a share of")
    gpu_type: tuple[str, ...] = Field(
        default=(),
        description='accepted types, any of them: "a100 or h100"; a MIG profile accepts such slices: "a100 or 3g.40gb"',
    )
    mig_profile: Annotated[str, Field(pattern=rf"^(any|{MIG_PROFILE})$", max_length=40)] | None = Field(
        default=None, description='whole MIG slices: "2g.20gb", or "any"; gpu says how many, 1 where it is not given'
    )

    @model_validator(mode="before")
    @classmethod
    def _types_may_be_text(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cast(dict[str, Any], data)
        given = fields.get("gpu_type")
        names: list[Any] = (
            [given] if isinstance(given, str) else list(cast(Any, given)) if isinstance(given, (list, tuple)) else []
        )
        if not names or not all(isinstance(name, str) for name in names):
            return fields
        return {**fields, "gpu_type": tuple(one for name in names for one in _TYPES.split(name.strip()))}

    @model_validator(mode="after")
    def _gpu_makes_sense(self) -> Resources:
        if self.gpu > MILLI and self.gpu % MILLI:
            raise ValueError(
                f"gpu must be a whole number or below 1, found {self.gpu / MILLI}; for shares of several: gpu_devices"
            )
        if self.gpu >= MILLI and self.gpu_memory:
            raise ValueError("gpu_memory is for shares: a whole device comes with all its memory")
        if self.gpu >= MILLI and self.gpu_devices > 1:
            raise ValueError("gpu_devices is for shares: ask for several whole devices with gpu")
        if self.mig_profile is not None and (self.gpu % MILLI or self.gpu_memory or self.gpu_devices > 1):
            raise ValueError("mig_profile is for whole slices: gpu says how many, gpu_memory and gpu_devices are for shares")
        if not self.gpu and not self.gpu_memory and self.mig_profile is None and (self.gpu_type or self.gpu_devices > 1):
            raise ValueError("gpu_type and gpu_devices need gpu or gpu_memory beside them")
        slices = sorted(name for name in self.gpu_type if names_slice(name.strip().lower()))
        if slices:
            self._slices_make_sense(" or ".join(slices), mixed=len(slices) < len(self.gpu_type))
        return self

    def _slices_make_sense(self, slices: str, mixed: bool) -> None:
        if self.mig_profile is not None:
            raise ValueError(f"name the slices in gpu_type ({slices}) or in mig_profile, not in both")
        if self.gpu < MILLI:
            raise ValueError(f"a MIG slice ({slices}) is given whole: ask for gpu: 1, or name cards only in gpu_type")
        if self.gpu > MILLI and mixed:
            count = self.gpu // MILLI
            raise ValueError(f"gpu: {count} could be a card and a slice: ask for gpu: 1, or name only cards or only slices")

    def to_request(self, ports: int = 0) -> Request:
        return Request(self.cpu, self.memory, self.disk, self._gpu_request(), ports)

    def _gpu_request(self) -> GpuRequest | None:
        types = tuple(sorted({name.strip().lower() for name in self.gpu_type}))
        if self.gpu >= MILLI or self.mig_profile is not None:
            return GpuRequest(count=max(1, self.gpu // MILLI), types=types, mig_profile=self.mig_profile)
        if self.gpu or self.gpu_memory:
            return GpuRequest(self.gpu_devices, self.gpu, self.gpu_memory, exclusive=False, types=types)
        return None


class AmountsView(Outgoing):
    """Whole units, as the core counts them."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    gpu_milli: int = 0
    gpu_memory_mib: int = 0

    @staticmethod
    def of(amounts: Amounts) -> AmountsView:
        return AmountsView(
            cpu_milli=amounts.cpu_milli,
            memory_bytes=amounts.memory_bytes,
            disk_bytes=amounts.disk_bytes,
            gpu_milli=amounts.gpu_milli,
            gpu_memory_mib=amounts.gpu_memory_mib,
        )


class GrantView(Outgoing):
    """What an allocation holds of one device."""

    uuid: str
    index: int
    compute_milli: int
    memory_mib: int
    sharing: str
    simulated: bool = False
    card_milli: int = MILLI

    @staticmethod
    def of(grant: DeviceGrant) -> GrantView:
        return GrantView(
            uuid=grant.uuid,
            index=grant.index,
            compute_milli=grant.compute_milli,
            memory_mib=grant.memory_mib,
            sharing=grant.sharing.value,
            simulated=grant.simulated,
            card_milli=grant.card_milli,
        )
