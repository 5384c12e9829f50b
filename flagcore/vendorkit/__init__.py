"""What vendors need to describe their chips: files of chips and costs, and readers of management tools."""
