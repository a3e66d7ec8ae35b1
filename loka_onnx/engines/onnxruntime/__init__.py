"""ONNX Runtime: the planned ONNX file on one of its execution providers.

=============  ==================================  =====================================================
provider       precisions that it runs             FP8
=============  ==================================  =====================================================
CPU            FP32, INT8 (by UINT8 or INT8)       simulated: its Q and DQ are real, its products FP32
CUDA           FP32 (TF32 off), FP16, BF16         simulated: its Q and DQ take E4M3FN and E5M2, of FP32
                                                   and FP16 only, and products run on what DQ gives
TensorRT       FP16, BF16 (strongly typed)         declined: it does not tell which sites engaged FP8
MIGraphX       FP32, FP16, BF16                    declined: MIGraphX does not parse E4M3FN
=============  ==================================  =====================================================

INT8 graphs, which never hold FP8, are loaded with all optimizations, which fuse Q/DQ and product
(`cpu_form`). A processor that adds the products in 16 bits is declined, as they saturate.

Some operators have an FP16 kernel on CUDA but none for BF16 (ReduceMean, Reciprocal, Log, LeakyRelu, Pad,
comparisons; `docs/OperatorKernels.md` of ONNX Runtime): a model with one in BF16 fails to load or runs it
elsewhere, as the placement of the loaded engine shows. ``com.microsoft.GemmFloat8`` multiplies FP8 on CUDA,
but allocates device memory in every call, which is slow and cannot be captured into a CUDA graph.
"""
