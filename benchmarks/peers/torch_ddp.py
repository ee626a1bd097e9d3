"""torch's DistributedDataParallel or FSDP2 over Gloo, as a user of torch writes the loop; alone without.

Alone it runs on a GPU, too, and compiled by `torch.compile`.
"""

import os

from peers import Peer


def register(model, kind):
    """Compress gradients by a hook of torch: halves, or PowerSGD of rank 4 from the first steps on."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if kind == "power_sgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return
    hooks = {"float16": default_hooks.fp16_compress_hook, "bfloat16": default_hooks.bf16_compress_hook}
    model.register_comm_hook(None, hooks[kind])


#: The kinds of compression that torch has.
KINDS = ("bfloat16", "float16", "power_sgd")


def shard(model, processes):
    """Divide each layer's weights over the processes, as FSDP2's documentation does it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (processes,))
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def start(place, in_parts=False, compiled=False):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1 if place.processes > 1 else os.cpu_count())
    torch.manual_seed(0)
    device = torch.device("cuda" if place.platform == "gpu" else "cpu")
    # As JAX multiplies float32 on GPUs.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = place.workload.torch_model().to(device)
    if place.processes > 1:
        address = f"tcp://{place.host}:{place.port}"
        dist.init_process_group("gloo", init_method=address, rank=place.rank, world_size=place.processes)
        if in_parts:
            shard(model, place.processes)
        else:
            model = torch.nn.parallel.DistributedDataParallel(model)
        if place.compress:
            register(model, place.compress)
    if compiled:
        model = torch.compile(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loss_fn = torch.nn.CrossEntropyLoss()
    x, y = place.data()
    x = torch.from_numpy(x.transpose(0, 3, 1, 2).copy() if place.workload.image else x)
    y = torch.from_numpy(y).long()
    generator = torch.Generator().manual_seed(1)
    own = place.batch // place.processes
    made = [0]

    def batch(chosen):
        """Rows on the device; a GPU reads them from memory that stays where it is."""
        if device.type == "cpu":
            return x[chosen], y[chosen]
        return [rows[chosen].pin_memory().to(device, non_blocking=True) for rows in (x, y)]

    def epoch(rows=None, each=lambda: None):
        model.train()
        order = torch.randperm(len(x), generator=generator)[: rows or len(x)]
        loss_sum, right = torch.zeros((), device=device), torch.zeros((), device=device)
        for start in range(0, len(order), place.batch):
            mine = order[start : start + place.batch][place.rank * own : (place.rank + 1) * own]
            optimizer.zero_grad(set_to_none=True)
            features, labels = batch(mine)
            logits = model(features)
            loss = loss_fn(logits, labels)
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
            right += (logits.detach().argmax(-1) == labels).float().mean()
            made[0] += 1
            each()
        return float(loss_sum), float(right)

    @torch.no_grad()
    def evaluate():
        model.eval()
        right = torch.zeros((), device=device)
        for start in range(0, len(x), place.batch):
            features, labels = batch(slice(start, start + place.batch))
            right += (model(features).argmax(-1) == labels).float().mean()
        return float(right)

    def epoch_and_save():
        epoch()
        if place.rank == 0:
            path = os.path.join(place.folder, "backup.pt")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    return Peer(
        first=lambda: epoch(place.batch),
        actions={
            "fit": (epoch, len(x)),
            "fit, callback": (lambda: epoch(each=lambda: None), len(x)),
            "fit, backup": (epoch_and_save, len(x)),
            "evaluate, same batch": (evaluate, len(x)),
        },
        steps=lambda: made[0],
        training=dict.fromkeys(["fit", "fit, callback", "fit, backup"], place.workload.steps),
    )
