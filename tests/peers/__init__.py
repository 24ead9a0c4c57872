"""The cases of the tests that other libraries have for custom derivatives, and what becomes of them.

A case is right if the test of its name holds here, announced if that test asserts an error where
the other library has a number, and absent if it asks for something that is not here.
"""

import ast
from pathlib import Path
from typing import NamedTuple


class Peer(NamedTuple):
    """The tests of a library.

    Attributes:
        name: The library.
        version: Which of its tests.
        place: The file of our tests, and the class there, if it has tests of several libraries.
        together: Cases that share a test with another one.
        announced: Those that are errors here, and numbers there.
        absent: Those without a counterpart, by reason.
    """

    name: str
    version: str
    place: tuple[str, ...]
    together: tuple[str, ...] = ()
    announced: tuple[str, ...] = ()
    absent: dict[str, tuple[str, ...]] = {}

    def tests(self) -> list[str]:
        """The names of our tests, by class."""
        file, *classes = self.place
        found = ast.parse((Path(__file__).parent / file).read_text()).body
        return [
            f"{c.name}.{f.name}"
            for c in found
            if isinstance(c, ast.ClassDef) and c.name in (classes or [c.name])
            for f in c.body
            if isinstance(f, ast.FunctionDef) and f.name.startswith("test_")
        ]

    def counts(self) -> tuple[int, int, int, int]:
        """The numbers of cases, of counterparts, of those that are right, and of those announced."""
        counterparts = len(self.tests()) + len(self.together)
        absent = sum(map(len, self.absent.values()))
        announced = len(self.announced)
        return counterparts + absent, counterparts, counterparts - announced, announced


_SYMBOLIC = "rules are not told which tangents are zero"
_JAXPR = "about JAX's programs and their text"

PEERS = [
    Peer(
        "JAX",
        "`custom_jvp` and `custom_vjp`, August 2026",
        ("test_jax.py",),
        (
            *("CustomJVP.float0_initial_style", "CustomVJP.nondiff_argnames"),
            *("CustomVJP.nondiff_arg_nested_tracer_error", "CustomVJP.fwd_closes_over_tracer"),
            *("CustomVJP.bwd_nones_vmap", "CustomVJP.closure_convert_mixed_consts"),
            "CustomVJP.custom_gradient_can_return_singleton_value_in_vjp",
            "CustomVJP.pytree_nones_returned_by_bwd",
        ),
        ("CustomVJP.float0", "CustomVJP.float0_cotangents_automatically_handled"),
        {
            "named axes": (
                "CustomJVP.initial_style_vmap_with_collective",
                "CustomVJP.initial_style_vmap_with_collective",
            ),
            "skipped or unwritten there": (
                *("CustomJVP.nondiff_arg_jit_tracer", "CustomJVP.vmap_axes", "CustomJVP.pmap"),
                *("CustomVJP.closed_over_jit_tracer", "CustomVJP.vmap_axes", "CustomVJP.pmap"),
            ),
            "about rules that JAX itself has": ("CustomJVP.hard_stuff", "CustomVJP.issue2511"),
            _SYMBOLIC: (
                "CustomJVP.symbolic_zero_custom_jvp",
                "CustomJVP.symbolic_zero_custom_jvp_vmap_output",
                "CustomJVP.symbolic_zeros_memoization_caching",
                "CustomJVP.symbolic_zeros_under_jit",
                "CustomJVP.symbolic_zero_custom_jvp_vmap_doesnt_instantiate",
                "CustomJVP.symbolic_zero_under_vmap_of_jit",
                "CustomJVP.dce_symbolic_zeros",
                "CustomVJP.symbolic_zeros_nondiff_argnums",
                "CustomVJP.symbolic_zero_custom_vjp_basic",
                "CustomVJP.symbolic_zero_custom_vjp_bwd_shape_error",
                "CustomVJP.symbolic_zero_custom_vjp",
                "CustomVJP.symbolic_zero_custom_vjp_vmap_output",
                "CustomVJP.symbolic_zero_custom_vjp_custom_pytree",
                "CustomVJP.symbolic_zeros_memoization_caching",
                "CustomVJP.symbolic_zeros_remat",
            ),
            _JAXPR: (
                *("CustomJVP.maybe_perturbed_internal_helper_function", "CustomJVP.pretty_print"),
                *("CustomJVP.maybe_perturbed_int_regression", "CustomJVP.ensure_compile_time_eval"),
                *("CustomVJP.closure_convert_pytree_mismatch", "CustomVJP.pretty_print"),
                *("CustomVJP.custom_lin_pretty_print", "CustomVJP.bwd_rule_shape_mismatch_disable"),
            ),
            "value and rule are one function, and cannot differ": (
                "CustomVJP.fwd_rule_primal_out_type_doesnt_match_primal_error_message",
                *(
                    f"CustomVJP.optimize_remat{case}"
                    for case in (
                        *("", "_vmap", "_cond", "_jvp", "_gh21303", "_multiple_args", "_kwargs"),
                        "_custom_vmap",
                    )
                ),
            ),
            "logs of rules": (
                *("CustomVJP.custom_gradient_with_logs", "CustomVJP.defvjp_with_logs"),
                "CustomVJP.custom_gradient_with_logs_bad_return_errors",
                "CustomVJP.defvjp_with_logs_nondiff_argnums_and_none_logs",
                "CustomVJP.defvjp_with_logs_bad_return_errors",
            ),
        },
    ),
    Peer(
        "TensorFlow",
        "`tf.custom_gradient`, `tf.recompute_grad`, `tf.grad_pass_through`, 2.21",
        ("test_tf_gradients.py",),
        (
            *("testCustomGradientWithVariablesNoFalsePositives", "test_gradients_v1"),
            *("testFnRecomputeWithScopeGradient",),
        ),
        absent={
            "quantised dtypes": ("testCustomGradientQuantizedDtypeTraining",),
            "not about rules": ("testRVGradientsDynamicCond", "testRecomputeGradWrapped"),
        },
    ),
    Peer(
        "PyTorch",
        "`autograd.Function`, 2.9",
        ("test_autograd_functions.py",),
        (
            *("TestAutograd.dont_materialize_grads", "TestAutograd.mark_non_differentiable_mixed"),
            *("TestAutograd.mark_non_differentiable_none", "TestAutograd.once_differentiable"),
            "TestAutogradFunctionVmapAPI.has_vmap_staticmethod_and_has_generate_vmap_rule",
        ),
        absent={
            "tensors that change in place, and views of others": (
                "TestAutograd.custom_function_forward_mode_inplace_checks",
                "TestAutograd.custom_function_forward_mode_view_checks",
                "TestAutograd.custom_function_local_inplace",
                "TestAutograd.custom_function_mark_dirty_not_differentiable",
                "TestAutograd.return_duplicate_inplace",
                "TestAutograd.inplace",
            ),
            "about PyTorch's nodes and their names": (
                *("TestAutograd.will_engine_execute_node", "TestAutograd.accessing_invalid_node"),
                *("TestAutograd.legacy_function_deprecation_exception",),
                *("TestAutogradFunction.grad_fn_name", "TestAutograd.grad_fn_input_metadata"),
                *("TestAutograd.set_materialize_non_diff_grads",),
                *("TestAutogradFunction.once_differentiable_grad_vjp",),
            ),
            "rules for maps, which are not needed": (
                *("TestAutograd.custom_function_vmap_defaults",),
                *(
                    f"TestAutogradFunctionVmapAPI.{case}"
                    for case in (
                        *("info_object", "in_dims_single_input", "should_have_two_returns"),
                        "incompatible_out_dims_error_msg",
                    )
                ),
            ),
        },
    ),
    Peer(
        "Equinox",
        "`filter_custom_jvp`, `filter_custom_vjp`, June 2026",
        ("test_solvers_and_layers.py", "TestEquinox"),
        absent={
            _SYMBOLIC: (
                *("filter_custom_jvp_symbolic_zero", "filter_custom_vjp_symbolic_zero"),
                "double_filter_jvp",
            ),
            "about JAX's derivatives of Equinox' modules": (
                *("filter_grad", "filter_value_and_grad", "aux", "grad_jit_new", "grad_jit_old"),
                *("filter_jvp", "filter_vjp", "closure_convert_basic", "closure_convert_trivial"),
                *("pytree_jacfwd", "positional_first_argument"),
            ),
        },
    ),
    Peer(
        "jaxopt",
        "implicit differentiation, December 2025",
        ("test_solvers_and_layers.py", "TestJaxopt"),
        (
            *("custom_root_with_kwargs", "custom_root_with_kwargs_unordered"),
            "custom_root_with_kwargs_grad_unordered",
        ),
        absent={"a root is no solver, and has no auxiliary results": ("custom_root_with_has_aux",)},
    ),
    Peer(
        "Optimistix",
        "derivatives of roots and fixed points, May 2026",
        ("test_solvers_and_layers.py", "TestOptimistix"),
    ),
    Peer(
        "Keras",
        "`keras.ops.custom_gradient`, 3.15",
        ("test_solvers_and_layers.py", "TestKeras"),
    ),
    Peer(
        "TFP",
        "`tfp.math.custom_gradient`, 0.25",
        ("test_solvers_and_layers.py", "TestTFP"),
    ),
]


def section() -> str:
    """The section on these in docs/comparison.md."""
    lines = [
        "## The tests of other libraries",
        "",
        "What the tests of other libraries for custom derivatives ask, asked of the functions here, by a",
        "program for each case in the folder tests/peers.",
        "*Announced* is an error here where the other library has a number; *absent* are",
        "cases without a counterpart, each listed there with its reason.",
        "",
        "| tests | cases | with a counterpart | right | announced | absent |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for peer in PEERS:
        cases, counterparts, right, announced = peer.counts()
        absent = cases - counterparts
        numbers = (cases, counterparts, right, announced, absent)
        lines.append(f"| {peer.name}: {peer.version} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines) + "\n"
