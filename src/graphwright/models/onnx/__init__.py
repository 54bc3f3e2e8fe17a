"""Programs as ONNX files, and the proof that onnxruntime computes the same."""
