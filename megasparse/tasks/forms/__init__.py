"""The forms of tasks, how each is encoded, learned and evaluated: a module a form, its model beside it."""
