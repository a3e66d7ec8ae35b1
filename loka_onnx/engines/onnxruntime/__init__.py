"""ONNX Runtime: the planned ONNX file run by one of its execution providers.

What each provider really runs, and where that is known from:

=============  ==================================  =====================================================
provider       precisions that it runs             FP8
=============  ==================================  =====================================================
CPU            FP32                                simulated: its Q and DQ are real, its products FP32
CUDA           FP32 (TF32 off), FP16, BF16         simulated: its Q and DQ take E4M3FN and E5M2, of FP32
                                                   and FP16 only, and products run on what DQ gives
TensorRT       FP16, BF16 (strongly typed)         declined: it does not tell which sites engaged FP8
MIGraphX       FP32, FP16, BF16                    declined: MIGraphX does not parse E4M3FN
=============  ==================================  =====================================================

Types of CUDA kernels: `docs/OperatorKernels.md` of ONNX Runtime. Some operators have an FP16 kernel and none
for BF16 (ReduceMean, Reciprocal, Log, LeakyRelu, Pad, comparisons): a model that holds one in BF16 either
fails to load or runs it elsewhere, and the placement that is read back from the loaded engine says which.
``com.microsoft.GemmFloat8`` would multiply in FP8 on CUDA; it allocates device memory in every call, which
neither captures into a CUDA graph nor runs fast, so nothing is lowered to it.
"""
