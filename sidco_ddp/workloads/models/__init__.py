"""Plain `nn.Module` models, one family a file."""
