"""Arrays of many libraries as flat memory: one file for each library, none imported first."""
