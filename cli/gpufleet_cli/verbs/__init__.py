"""One file per verb; `main.py` lists them."""
