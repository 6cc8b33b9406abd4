"""Fits y = 3x + 1 with one process a member. Nothing here knows of Crater: MASTER_ADDR, RANK and WORLD_SIZE are torch's own."""

import torch
import torch.distributed as dist
from dagster_pipes import open_dagster_pipes
from torch.nn.parallel import DistributedDataParallel


def train(steps: int) -> tuple[float, float]:
    """Slope and offset. Each member draws its own points; the gradients are averaged over all members in each step."""
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(steps):
        x = torch.rand(64, 1)
        loss = torch.nn.functional.mse_loss(model(x), 3 * x + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.module.weight.item(), model.module.bias.item()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        with open_dagster_pipes() as pipes:
            slope, offset = train(int(pipes.extras["steps"]))
            pipes.log.info(f"member {dist.get_rank()} of {dist.get_world_size()} has y = {slope:.3f}x + {offset:.3f}")
            if dist.get_rank() == 0:
                pipes.report_asset_materialization(metadata={"slope": slope, "offset": offset, "members": dist.get_world_size()})
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
