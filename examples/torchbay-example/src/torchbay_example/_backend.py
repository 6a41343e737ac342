"""The example backend: a table of kernels, and a loop over the graph."""

from typing import Any

import numpy as np
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torchbay.plugin import Capabilities, CompileRequest, NoOptions, UnsupportedGraph

aten = torch.ops.aten
KERNELS: dict[Any, Any] = {
    aten.add.Tensor: np.add,
    aten.mm.default: np.matmul,
    aten.mul.Tensor: np.multiply,
    aten.relu.default: lambda x: np.maximum(x, 0),
    aten.sub.Tensor: np.subtract,
    aten.sum.dim_IntList: lambda x, dims, keep=False: x.sum(tuple(dims), keepdims=keep),
}


class ExampleExecutable:
    """Calls a kernel for each node, in order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @np.errstate(all="ignore")
    def run(self, inputs: list[Any]) -> list[Any]:
        """Return the graph's outputs for these inputs."""
        values: dict[Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = inputs.pop(0).detach().numpy()
            elif node.op == "call_function":
                kernel = KERNELS[node.target]
                values[node] = np.asarray(kernel(*map_arg(node.args, values.__getitem__)))
        outputs: Any = self.graph.output_node().args[0]
        return [laid_out(values[node], node.meta["val"]) for node in outputs]


def laid_out(array: Any, fake: torch.Tensor) -> torch.Tensor:
    """Return the array as a tensor with the strides that the graph promises."""
    result = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    return result.copy_(torch.from_numpy(array))


class ExampleBackend:
    """Takes the operators in its table, for float32 on the CPU."""

    name = "example"
    api_version = 1
    options = NoOptions
    capabilities = Capabilities(dtypes=frozenset({torch.float32}))

    def fingerprint(self) -> dict[str, str]:
        """Name what the results depend on."""
        return {"numpy": np.__version__}

    def supports(self, node: Node) -> bool:
        """Tell whether there is a kernel for the node and for what it is given."""
        dtypes = {
            getattr(each.meta["val"], "dtype", None) for each in (node, *node.all_input_nodes)
        }
        return node.target in KERNELS and not node.kwargs and dtypes == {torch.float32}

    def compile(self, request: CompileRequest) -> ExampleExecutable:
        """Keep the graph; a compiler would do its work here."""
        for node in request.graph.graph.nodes:
            if node.op not in ("placeholder", "output") and not self.supports(node):
                raise UnsupportedGraph(f"no kernel for {node.target}", account="torchbay-example")
        return ExampleExecutable(request.graph.graph)
