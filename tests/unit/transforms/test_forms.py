"""Every form that a shape mod must rewrite: which operators are left, with equal values."""

import pytest
from rewrite_models import op_types
from shape_cases import MODS
from shape_models import rewrite

AFTER = {
    "merged": {"gemms": "Gemm Relu Split Concat", "gemms_one_without_bias": "Gemm Tanh Split Mul",
        "query_key_value": "MatMul Split Add Add Transpose MatMul Softmax MatMul",
        "gemm_and_matmul": "MatMul Add Relu Split Add", "weights_on_the_left": "MatMul Split Concat",
        "a_residual_stays_behind": "MatMul Split Add Add Mul",
        "experts_then_experts": "Gemm Gemm Relu Gemm Relu Split Mul Add",
        "activations_with_constants_of_channels": "Gemm PRelu Add Mul LeakyRelu Split Concat",
        "unlike_activations_in_pairs": "Gemm Gemm Relu Softplus Split Split Concat",
        "one_weight_is_zero": "MatMul Relu Split Add"},
    "folded": {"a_transposed_weight": "MatMul", "a_cast_weight": "MatMul", "a_chain_with_two_ends": "Add Mul",
        "a_shape_that_is_put_together": "Reshape Relu Reshape",
        "rows_of_a_table_that_nothing_else_reads": "Add"},
    "no_ops": {"identity_and_dropout": "Relu", "casts": "Relu", "transposes_that_cancel": "Relu",
        "transposes_that_compose": "Transpose Relu Transpose Add", "reshapes": "Relu",
        "a_reshape_past_another": "Reshape Relu", "neutral_elements": "Relu"},
    "shared": {"transposes": "Transpose MatMul MatMul Relu Relu Add",
        "chains_with_equal_constants": "Reshape Relu Sigmoid Mul Flatten"},
    "einsum": {"interaction": "Transpose MatMul", "linear": "MatMul",
        "linear_of_the_middle_axis": "Transpose MatMul Transpose", "weight_first": "MatMul",
        "a_weight_for_each_token": "Transpose MatMul Transpose",
        "implicit": "MatMul", "any_rank": "Transpose MatMul", "projection_of_heads": "Reshape MatMul",
        "projection_to_heads": "MatMul Reshape Transpose",
        "projection_in_each_head": "Transpose Reshape MatMul Reshape Transpose",
        "heads": "Reshape Transpose Transpose MatMul"},
    "reassociated": {"learned_projection": "Transpose MatMul MatMul Relu",
        "projection_of_the_batch": "Transpose MatMul MatMul", "the_other_way": "Transpose MatMul MatMul",
        "a_weight_on_the_left": "Transpose MatMul MatMul"},
    "looked_up": {
        "stacked": "Less Where Add Gather Reshape Split Unsqueeze Unsqueeze Unsqueeze Unsqueeze Concat Relu",
        "flat_and_out_of_order": "Gather Less Where Add Gather Reshape Split Concat",
        "int32_ids_cast_on_the_way": "Gather Cast Less Where Add Gather Reshape Split Concat",
        "columns_that_keep_their_axis": "Less Where Add Gather Reshape Split Unsqueeze Unsqueeze Concat",
        "one_table": "Gather Gather Reshape Split Concat"},
    "joined": {"flat": "Concat", "nothing_else": "Relu", "stacked": "Reshape Concat Relu",
        "what_was_joined_is_split_and_joined_again": "Relu", "two_runs": "Concat"},
    "apart": {"a_learned_row": "Concat Gemm Relu", "a_row_for_two_layers": "Concat MatMul MatMul Add Add Mul",
        "target_attention": "Mul MatMul Concat Add MatMul Add Relu",
        "target_attention_of_rows": "Mul MatMul Concat Add MatMul Add Reshape Relu",
        "target_attention_of_any_length": "Mul MatMul Concat MatMul Add Reshape Relu",
        "a_tensor_twice": "MatMul", "two_towers": "Mul Concat MatMul",
        "two_candidates": "MatMul Concat MatMul Add Add Reshape Relu",
        "learned_positions": "MatMul Add Reshape",
        "a_bias_stays_with_its_layer": "Mul MatMul Concat Add MatMul Add MatMul"},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, forms in AFTER.items() for name in forms])
def test_every_form_is_rewritten_and_equal(kind, name, tmp_path):
    made, cases = MODS[kind]
    done = rewrite(cases[name].model(), made(), tmp_path)
    assert done.record.applied
    assert op_types(done.after) == AFTER[kind][name].split()


def test_no_form_is_forgotten():
    """Convolutions and padding have tests of their own."""
    assert {kind: set(forms) for kind, forms in AFTER.items()} == {
        kind: set(cases) for kind, (_, cases) in MODS.items() if kind not in {"convolution", "padded"}
    }
