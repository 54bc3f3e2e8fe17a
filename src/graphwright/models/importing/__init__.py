"""Opening networks that no template describes: torch modules and ONNX files."""
