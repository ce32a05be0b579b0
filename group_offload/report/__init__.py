"""A run, or a plan, as one page to look at: facts, and the page that shows them."""
