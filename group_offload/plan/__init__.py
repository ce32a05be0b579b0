"""Which group is stored where, and how long a pass takes then: budgets, speeds, the search, and the plan as people read it."""
