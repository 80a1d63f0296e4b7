"""What a run leaves behind: its folder, its manifest, and the lines it writes."""
