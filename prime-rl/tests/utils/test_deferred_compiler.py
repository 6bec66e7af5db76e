"""Stand-ins for PyTorch's compiler and SymPy: absent from a run that compiles nothing, and real once they are used.

Each test has an interpreter of its own, because a module is loaded only once.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest

for_this_torch = pytest.mark.skipif(not version("torch").startswith("2.13."), reason="the stand-ins are for torch 2.13")

DEFERRED = """
import sys
from prime_rl.utils.stand_ins.uncompiled import defer_compiler
defer_compiler()
import torch
import transformers.models.qwen3.modeling_qwen3
from torch.distributed.fsdp import fully_shard
from prime_rl.utils.stand_ins.deferred import is_deferred
assert is_deferred("torch._dynamo") and is_deferred("sympy")
"""
STEP = """
import os
from prime_rl.configs.trainer import AdamWConfig, ModelConfig
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.scoring import score_tokens
from prime_rl.trainer.optim.optimizer import clip_gradients, setup_optimizer
from prime_rl.trainer.process.parallel_dims import setup_mesh
from prime_rl.trainer.process.world import setup_world
config = ModelConfig(name=sys.argv[1], attn="sdpa", seq_len=64)
model = setup_model(config, setup_mesh(config, setup_world("cpu", 60)))
optimizer = setup_optimizer(AdamWConfig(lr=0.01), model)
losses = []
for _ in range(3):
    tokens = torch.arange(5, 25)[None]
    logits = score_tokens(model, tokens, torch.arange(20)[None], lambda hidden, logits_of: logits_of(hidden))
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:])
    loss.backward()
    clip_gradients(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss))
print(losses, flush=True)
"""
END = "\nimport os\nsys.stdout.flush()\nos._exit(0)\n"


def printed_by(code: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code) + END, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@for_this_torch
def test_steps_of_a_trainer_load_neither_the_compiler_nor_sympy(tiny_model_dir: Path) -> None:
    told = 'print([name for name in sys.modules if name.startswith(("torch._inductor", "mpmath"))])'
    told += '\nprint(is_deferred("torch._dynamo"), is_deferred("sympy"))'
    losses, loaded, deferred = printed_by(DEFERRED + STEP + told, str(tiny_model_dir))
    assert (loaded, deferred) == ("[]", "True True")
    assert losses == printed_by("import sys, torch\n" + STEP, str(tiny_model_dir))[0]


@for_this_torch
def test_a_module_that_is_used_is_the_real_one_and_the_same_object() -> None:
    use = """
    held = torch._dynamo
    held.reset()
    assert torch._dynamo is held is sys.modules["torch._dynamo"]
    names = {name for name in vars(held) if not name.startswith("__")}
    print(sorted(names))
    assert held.disable.__module__ == "torch._dynamo.decorators" and "sympy" in sys.modules
    """
    normal = """
    import sys, torch._dynamo
    import transformers.models.qwen3.modeling_qwen3
    torch._dynamo.reset()
    print(sorted(name for name in vars(torch._dynamo) if not name.startswith("__")))
    """
    assert printed_by(DEFERRED + textwrap.dedent(use)) == printed_by(normal)


@for_this_torch
def test_what_is_compiled_later_is_compiled_and_what_is_switched_off_stays_off() -> None:
    code = """
    seen = []
    def backend(graph, inputs):
        seen.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward
    apart = torch.compiler.disable(lambda x: torch.sin(x))
    def function(x):
        return torch.cos(apart(x + 1))
    x = torch.ones(3)
    eager = function(x)
    assert is_deferred("torch._dynamo")
    compiled = torch.compile(function, backend=backend)(x)
    assert not is_deferred("torch._dynamo") and torch.equal(compiled, eager)
    assert torch.equal(apart(x), torch.sin(x))
    print(any("cos" in str(each) for each in seen), any("sin" in name for each in seen for name in each))
    """
    assert printed_by(DEFERRED + textwrap.dedent(code)) == ["True False"]


@for_this_torch
def test_functions_marked_before_are_marked_in_the_real_compiler() -> None:
    code = """
    from torch._dynamo import trace_rules
    def opaque(x): return x
    def constant(): return 1
    torch.compiler.allow_in_graph(opaque)
    torch.compiler.assume_constant_result(constant)
    assert is_deferred("torch._dynamo")
    trace_rules.clear_lru_cache()
    assert is_deferred("torch._dynamo")
    print(trace_rules.is_callable_allowed(opaque), constant._dynamo_marked_constant)
    """
    assert printed_by(DEFERRED + textwrap.dedent(code)) == ["True True"]


@for_this_torch
def test_a_submodule_is_executed_once_and_after_its_package() -> None:
    code = """
    import torch._dynamo.utils as utils
    assert not is_deferred("torch._dynamo") and torch._dynamo.utils is utils is sys.modules["torch._dynamo.utils"]
    assert utils.counters is torch._dynamo.exc.counters and utils.__spec__.name == "torch._dynamo.utils"
    from sympy.core import Symbol
    import sympy
    print(sympy.Symbol is Symbol, is_deferred("sympy"))
    """
    assert printed_by(DEFERRED + textwrap.dedent(code)) == ["True False"]


@for_this_torch
def test_answers_for_numbers_are_those_of_the_real_functions() -> None:
    code = """
    from prime_rl.utils.stand_ins.plain_sizes import SHAPES
    module = sys.modules[SHAPES]
    calls = [
        *((name, value) for name in ("expect_true", "guard_bool", "guard_or_false", "guard_or_true",
          "guarding_hint_or_throw", "statically_known_true") for value in ((True,), (False,))),
        *((name, (value,)) for name in ("guard_int", "guarding_hint_or_throw",
          "has_free_unbacked_symbols", "has_guarding_hint", "is_nested_int", "optimization_hint")
          for value in (0, 1, -3, 2**40)),
        *((name, value) for name in ("sym_and", "sym_or")
          for value in ((True,), (True, False), (False, False, True), (True, True, True))),
        *(("sym_eq", value) for value in ((1, 1), (1, 2), ((1, 2), [1, 2]), ((1, 2), (1, 3)), ((1,), (1, 2)), ((), ()),
          (torch.Size((2, 3)), (2, 3)), (((1, 2), 3), [(1, 2), 3]))),
        ("compute_unbacked_bindings", (None, 1, 2)),
    ]
    values = [1, (1, (2, True)), torch.zeros(2, 3), [torch.zeros(4).as_strided((2,), (2,), 1)], torch.Size((5,))]
    stand_ins = {name: getattr(module, name) for name, _ in calls}
    walks = [getattr(module, name) for name in ("_iterate_exprs", "_iterate_nodes")]
    ours = [stand_ins[name](*arguments) for name, arguments in calls]
    assert all(list(walk(value)) == [] for walk in walks for value in values)
    assert is_deferred(SHAPES) and is_deferred("sympy")
    module.ShapeEnv
    assert not is_deferred(SHAPES) and not is_deferred("sympy")
    real = [getattr(module, name)(*arguments) for name, arguments in calls]
    assert not any(getattr(module, name) is stand_ins[name] for name in stand_ins)
    assert ours == real and [type(each) for each in ours] == [type(each) for each in real], (ours, real)
    real_walks = [getattr(module, walk) for walk in ("_iterate_exprs", "_iterate_nodes")]
    assert all(list(walk(value)) == [] for walk in real_walks for value in values)
    print(len(ours))
    """
    assert printed_by(DEFERRED + textwrap.dedent(code)) == ["53"]


@for_this_torch
def test_symbols_go_to_the_real_functions() -> None:
    code = """
    from prime_rl.utils.stand_ins.plain_sizes import SHAPES
    from torch.distributed.tensor import _decompositions
    stand_in = sys.modules[SHAPES].guard_or_false
    ours = _decompositions.GuardOnDataDependentSymNode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    symbol = ShapeEnv().create_unbacked_symint()
    real = sys.modules[SHAPES].GuardOnDataDependentSymNode
    assert _decompositions.GuardOnDataDependentSymNode is real is not ours
    try:
        bool(symbol == 3)
    except real:
        print(stand_in(symbol == 3), stand_in(symbol == symbol))
    """
    assert printed_by(DEFERRED + textwrap.dedent(code)) == ["False True"]


@for_this_torch
def test_the_class_of_expressions_is_sympys_own_for_all_who_use_it() -> None:
    code = """
    from sympy import Basic
    assert not isinstance(1, Basic) and not isinstance(torch.zeros(1), Basic) and is_deferred("sympy")
    class Own(Basic): pass
    import sympy
    print(isinstance(sympy.Symbol("x"), Basic), issubclass(Own, sympy.Basic), issubclass(sympy.Symbol, Basic))
    """
    assert printed_by(DEFERRED + textwrap.dedent(code)) == ["True True True"]


def test_another_version_of_torch_gets_the_real_modules() -> None:
    use = """
    import sys
    from prime_rl.utils.stand_ins.uncompiled import defer_compiler
    defer_compiler("2.11.0+cu130")
    import torch._dynamo
    from prime_rl.utils.stand_ins.deferred import is_deferred
    print(is_deferred("torch._dynamo"), is_deferred("sympy"), len(vars(torch._dynamo)) > 50)
    """
    assert printed_by(use) == ["False False True"]
