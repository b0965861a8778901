"""Other libraries beside ours, on real workers: each row of docs/ecosystem.md has what shows it here."""
