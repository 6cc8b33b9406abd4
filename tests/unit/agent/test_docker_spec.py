"""What is asked of the engine, and which images may be."""

from __future__ import annotations

import pytest

from crater_agent.docker_engine import facts_of
from crater_agent.docker_spec import refuse_image, registry_of, with_tag
from crater_core.errors import RuntimeFailed


@pytest.mark.parametrize(
    ("image", "registry"),
    [
        ("busybox", "docker.io"),
        ("team/tool:2", "docker.io"),
        ("ghcr.io/team/tool@sha256:0", "ghcr.io"),
        ("10.0.0.1:5000/tool", "10.0.0.1:5000"),
        ("localhost/tool", "localhost"),
    ],
)
def test_the_registry_is_read_from_an_images_name_by_dockers_rule(image: str, registry: str):
    assert registry_of(image) == registry


def test_without_a_tag_latest_is_meant():
    assert [with_tag(name) for name in ("a", "h:5000/a", "a:1", "a@sha256:0")] == [
        "a:latest",
        "h:5000/a:latest",
        "a:1",
        "a@sha256:0",
    ]


def test_the_list_of_images_is_compared_with_and_without_the_tag():
    refuse_image("ghcr.io/team/tool", ["ghcr.io/team/*"])
    refuse_image("tool", ["tool:latest"])
    refuse_image("anything", [])
    with pytest.raises(RuntimeFailed, match=r"docker\.images: ghcr\.io/team/\*"):
        refuse_image("ghcr.io/teamwork/tool", ["ghcr.io/team/*"])


def test_an_engine_is_known_by_what_it_lists():
    facts = facts_of({"ServerVersion": "29", "CpuCfsQuota": True, "DiscoveredDevices": [{"ID": "nvidia.com/gpu=GPU-a"}]})
    assert (facts.version, facts.cpu_quota, facts.cdi_devices) == ("29", True, frozenset({"nvidia.com/gpu=GPU-a"}))
    assert facts_of({}).cdi_devices == frozenset()
