"""What a memory is: an architecture, an attentional bias, a retention gate, an algorithm, and named presets."""
