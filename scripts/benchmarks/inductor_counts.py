"""The kernels that torch.compile would launch on a GPU, and the bytes that they move, counted without one.

`counting_backend`, within `like_an_h100`, passes a graph through all of inductor but its last part: it is lowered,
scheduled and fused as for an H100, and then, instead of generated code, run on fake tensors. It uses parts of torch
that are not public (2.13).
"""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V

H100 = {"major": 9, "minor": 0, "multi_processor_count": 132, "regs_per_multiprocessor": 65_536, "warp_size": 32}
H100 |= {"max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024}


def counting_backend(counted):
    """A backend of torch.compile; `counted(graph_module, kernels, bytes)` wraps what it returns for each graph."""

    def count(graph_module, inputs, is_backward: bool = False, **kwargs):
        fake_mode = torch._guards.detect_fake_mode(inputs)
        with V.set_fake_mode(fake_mode):
            compile_fx.record_original_output_strides(graph_module)
            compile_fx.view_to_reshape(graph_module)
            compile_fx.fake_tensor_prop(graph_module, inputs)
            compile_fx._recursive_post_grad_passes(graph_module, is_inference=False)
            compile_fx.fake_tensor_prop(graph_module, inputs)
            options = {"example_inputs": inputs, "shape_env": fake_mode.shape_env, "is_backward": is_backward}
            graph = GraphLowering(graph_module, **options)
            with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
                graph.run(*inputs)
                graph._update_scheduler()
                nodes = [node for node in graph.scheduler.nodes if not node.is_extern()]
                sizes = [node.get_read_write_buffers_sizes() for node in nodes]
        sizes = [number for node, number in zip(nodes, sizes, strict=True) if number and not node.is_template()]
        return counted(graph_module, len(sizes), sum(sizes))

    return lambda graph_module, inputs: compile_fx.compile_fx(graph_module, inputs, inner_compile=count)


@contextmanager
def like_an_h100():
    """Within it inductor finds an H100, and Triton; the graph of a backward pass is compiled late, so stay within."""
    properties = SimpleNamespace(**H100)
    constants = {key: value for key, value in H100.items() if key != "minor"}
    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        mock.patch.object(DeviceProperties, "create", lambda _: DeviceProperties("cuda", 0, cc=90, **constants)),
        mock.patch.object(scheduler, "has_triton", lambda *_: True),
        config.patch(joint_graph_constant_folding=False),  # which computes
    ):
        yield
