"""Other libraries next to ours, on real workers: each library of docs/works-with.md is tested here."""
