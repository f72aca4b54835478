PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0}
"""Dense bf16 peak per device, by a word in its name."""
