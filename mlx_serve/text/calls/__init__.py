"""Tool calls as models write them: what each family writes, and readers that take it as it comes."""
