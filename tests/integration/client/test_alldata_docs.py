"""The examples of docs/alldata.md do what they say."""

from __future__ import annotations

import doctest
from pathlib import Path

from harness import SchedulerProcess

from crater_core.client import CraterClient

PAGE = Path(__file__).parents[3] / "docs" / "alldata.md"


def test_the_examples_of_the_page_run_as_they_stand(bare: SchedulerProcess, declare_node):
    declare_node(bare.url, "gpu-node-01", cpu=64, memory_bytes=256 * 10**9, gpus=4)
    with CraterClient(bare.url) as client:
        limits = {"gpu": 4, "cpu": 32, "memory": "128GB", "disk": "1TB"}
        client.set_quota("training-quota", {"limits": limits})
        client.set_quota("inference-quota", {"limits": {"gpu": 2, "cpu": 16, "memory": "64GB", "disk": "200GB"}})
    text = PAGE.read_text("utf-8").replace("http://127.0.0.1:8080", bare.url).replace("```", "")
    story = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    assert len(story.examples) > 20
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    told: list[str] = []
    runner.run(story, out=told.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(told)
