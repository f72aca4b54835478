"""Official files to examples: a module a task, and what these share (rows, parts, images, calendar, text_task)."""
