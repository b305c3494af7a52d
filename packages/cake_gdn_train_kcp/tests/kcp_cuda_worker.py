"""One rank of `test_kcp_cuda` on a GPU of its own, over NCCL; started by the test as a script.

`python kcp_cuda_worker.py RANK WORLD_SIZE INIT_FILE FOLDER` leaves `FOLDER/results_<rank>.pt`.
"""

import importlib.util
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import cake_gdn_train_kcp
from cake_shared.testing.gdn_cuda import moved, on_cpu
from cake_shared.testing.gdn_inputs import base, packed
from cake_shared.testing.gdn_run import run


def cases():
    """The test's cases of two ranks."""
    path = Path(__file__).with_name("test_kcp_cuda.py")
    spec = importlib.util.spec_from_file_location("test_kcp_cuda", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TWO_RANKS


def rule(*arguments, **keywords):
    """The sharded rule over all ranks."""
    return cake_gdn_train_kcp.chunk_gated_delta_rule(*arguments, group=dist.group.WORLD, **keywords)


def main(rank, world_size, init_file, folder):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{init_file}", rank=rank, world_size=world_size, device_id=device
    )
    results = {}
    for name, (lengths, cuts) in cases().items():
        whole = packed(base(sum(lengths), 2, 4), lengths)
        shards = cake_gdn_train_kcp.plan_shards(whole.cu_seqlens, world_size, cuts=cuts)
        own = whole.tokens(shards[rank].start, shards[rank].stop)
        own = moved(own.with_(cu_seqlens=None), device).with_(cu_seqlens=whole.cu_seqlens)
        results[name] = on_cpu(run(rule, own, output_final_state=False, shards=shards))
        # Once more, now that everything is built: no pass may wait for the device.
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again = run(rule, own, output_final_state=False, shards=shards)
        torch.cuda.set_sync_debug_mode("default")
        for key, value in on_cpu(again).items():
            if value is not None:
                torch.testing.assert_close(value, results[name][key], msg=key)
    torch.save(results, folder / f"results_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
