"""Programs that run both on an H200 and in the emulator, and the comparison of what they write.

Each program is one instruction family: it reads seeded inputs, executes the instructions and writes every result to
an output buffer. ``python -m cake_shared.emulator.conformance --device --out results.json`` runs all of them on the GPU
and in the emulator from one PTX text and writes one result file; without ``--device`` only the emulator runs and its
results are held to the NumPy references.
"""
