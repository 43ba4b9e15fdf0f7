"""What the patches build on, looked up in the source of every release, without installing any of them."""
