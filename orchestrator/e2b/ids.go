package e2b

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/distribution/reference"

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

// imagePrefix begins what isn't a template but an image. There is a slash behind it, which a tag can't have.
const imagePrefix = "image:"

// parseOrigin reads what a sandbox is made of: a template, or an image, which has its registry's host.
func parseOrigin(field, s string) (template db.Ref, image string, err error) {
	rest, is := strings.CutPrefix(s, imagePrefix)
	if !is || !strings.Contains(rest, "/") {
		template, err = parseRef(field, s)
		return template, "", err
	}
	host, _, _ := strings.Cut(rest, "/")
	switch _, err := reference.ParseNamed(rest); {
	case len(s) > maxRef:
		return template, "", invalid("%s: it has %d characters, there can be %d", field, len(s), maxRef)
	case !strings.ContainsAny(host, ".:") && host != "localhost":
		return template, "", invalid("%s: %s has no registry: image:docker.io/library/debian:12 has", field, quote(s))
	case err != nil:
		return template, "", invalid("%s: %s isn't an image's full name: %v", field, quote(s), err)
	}
	return template, rest, nil
}

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
