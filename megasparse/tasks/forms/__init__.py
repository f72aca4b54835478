"""How the tasks of each form are encoded, learned and judged: a module a form, its model beside it."""
