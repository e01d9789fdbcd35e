"""A process of its own for the GPU kernel: in triton's interpreter, or compiled for a GPU that is not there.

Requests and answers are pickles on standard input and output. It is apart because triton decides when it is imported
whether functions are interpreted.
"""

import pickle
import sys


def interpret(arrays, joined):
    """Statistics of tensors given as (bytes, dtype, first entry); ``joined`` chooses what is returned."""
    import torch

    from gradflow_export.metrics.arrays import entries
    from gradflow_export.metrics.arrays import one_launch as onelaunch

    tensors = [
        torch.frombuffer(bytearray(data) or bytearray(16), dtype=getattr(torch, dtype))[skip : skip + count]
        for data, dtype, skip, count in arrays
    ]
    rows = onelaunch.launch(tensors, upload)
    if not joined:
        return rows.tolist()
    norms, others = entries._from_rows(rows)
    return [norms.tolist(), *others.tolist()]


def upload(numbers):
    """Stand in for the copy to a device."""
    import torch

    return torch.from_numpy(numbers.copy())


def compile_for(capability):
    """Compile both launches for an NVIDIA GPU and return the size of each; 0 where loads are not as wide as they can be."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gradflow_export.native import triton_statistics as kernels

    target = GPUTarget("cuda", capability, 32)
    tables = {"pointers": "*i64", "plan": "*i64", "partials": "*fp64", "first": "i32", "pieces": "i32"}
    loads = {}
    for name, aligned in (("float32", True), ("bfloat16", True), ("bfloat16", False), ("float64", True)):
        constants = {"ENTRY": getattr(tl, name), "ALIGNED": aligned, "BLOCK": kernels.BLOCK}
        source = ASTSource(kernels.read_pieces, {**tables, **dict.fromkeys(constants, "constexpr")}, constants)
        compiled = triton.compile(source, target=target)
        wide = "ld.global.v" in compiled.asm["ptx"]
        loads[f"{name} {aligned}"] = len(compiled.asm["cubin"]) if wide == aligned else 0
    tables = {"partials": "*fp64", "bounds": "*i64", "out": "*fp64", "pieces": "i32", "tensors": "i32"}
    source = ASTSource(kernels.join_pieces, {**tables, "JOINED": "constexpr"}, {"JOINED": kernels.JOINED})
    loads["join"] = len(triton.compile(source, target=target).asm["cubin"])
    return loads


def main():
    """Answer until standard input ends."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = {"interpret": interpret, "compile_for": compile_for}[name](*arguments)
        except Exception as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
