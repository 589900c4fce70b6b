package e2b

import (
	"fmt"
	"regexp"

	"github.com/cubesandbox/cube/orchestrator/db"
)

// sandboxForm is a sandbox's id, with the name of a client behind it where an old SDK has put one.
var sandboxForm = regexp.MustCompile(`^([a-z0-9]{1,64})(?:-[A-Za-z0-9_-]{0,64})?$`)

// clientID was the node that a sandbox is on. Generated models of SDKs want one.
const clientID = "00000000"

// sandbox is the id in the call's path.
func (c *call) sandbox() (string, error) { return parseSandboxID("sandboxID", c.path("sandboxID")) }

// parseSandboxID reads one. field is what an error names.
func parseSandboxID(field, s string) (string, error) {
	m := sandboxForm.FindStringSubmatch(s)
	if m == nil {
		return "", invalid("%s: %s can't be a sandbox's id, which is made of a-z and 0-9", field, quote(s))
	}
	return m[1], nil
}

// maxRef is longer than any name of a template, with a team and a tag.
const maxRef = 400

// parseRef reads the name or id of a template or snapshot. field is what an error names.
func parseRef(field, s string) (db.Ref, error) {
	if len(s) > maxRef {
		return db.Ref{}, invalid("%s: it has %d characters, there can be %d", field, len(s), maxRef)
	}
	r, err := db.ParseRef(s)
	if err != nil {
		return r, fmt.Errorf("%s: %w", field, err)
	}
	return r, nil
}
