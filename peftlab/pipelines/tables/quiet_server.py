"""The first module that the server of a table's processes imports: what it imports next prints no warnings."""

from peftlab.errors import quiet_libraries

quiet_libraries()
