package e2b

import (
	"strings"
	"testing"
	"time"
)

// TestOfImage makes a sandbox of an image of which nobody has made a template: it has what it was given, is paused and saved as others
// are, and gone when it is killed. With CUBE_TEST_LONG, so many are made that a template is.
func TestOfImage(t *testing.T) {
	const image = "image:cube.local/base:bookworm"
	c := newClient(t)
	before := footprint(t)
	began := time.Now()
	sb := c.create(map[string]any{"templateID": image, "envVars": map[string]string{"GIVEN": "here"}, "allow_internet_access": false})
	t.Logf("made after %v", time.Since(began).Round(time.Millisecond))
	c.says(sb, "echo $GIVEN; id -un; ls -d /root", "here\nroot\n/root")
	if r := s.Cube("network", "policy", "get", "--json", sb.ID); r.Err != nil || !strings.Contains(r.Stdout, `"default": "deny"`) {
		t.Errorf("what it reaches: %s, %v", r.Stdout, r.Err)
	}
	c.marks(sb, "word")
	c.do("POST", "/sandboxes/"+sb.ID+"/pause", nil, nil, 204)
	c.do("POST", "/sandboxes/"+sb.ID+"/connect", map[string]any{"timeout": 3600}, nil, 201)
	c.goesOn(sb, "word")
	var snap struct {
		ID string `json:"snapshotID"`
	}
	c.do("POST", "/sandboxes/"+sb.ID+"/snapshots", nil, &snap, 201)
	child := c.create(map[string]any{"templateID": snap.ID})
	c.goesOn(child, "word")
	c.killAll()
	c.do("DELETE", "/templates/"+snap.ID, nil, nil, 204)
	if code, message, err := c.call("POST", "/v2/sandboxes", map[string]any{"templateID": "image:127.0.0.1:1/none/here:1"}, nil); err != nil || code/100 == 2 || !strings.Contains(message, "127.0.0.1:1/none/here:1") {
		t.Errorf("an image that can't be had: %d %s, %v", code, message, err)
	}
	if long() {
		c.promotes(image)
	}
	var all []struct {
		ID    string   `json:"templateID"`
		Names []string `json:"names"`
	}
	c.do("GET", "/templates", nil, &all, 200)
	for _, one := range all {
		if strings.Contains(strings.Join(one.Names, " "), "/image-") {
			c.do("DELETE", "/templates/"+one.ID, nil, nil, 204)
		}
	}
	asBefore(t, before)
}

// promotes makes sandboxes of an image until those that are made of it go on from a snapshot.
func (c *client) promotes(image string) {
	c.Helper()
	builds := map[string]bool{}
	s.Eventually(c, 5*time.Minute, "a build with a snapshot", func() bool {
		began := time.Now()
		sb := c.create(map[string]any{"templateID": image})
		took := time.Since(began)
		c.says(sb, "echo here", "here")
		var all []struct {
			ID    string `json:"templateID"`
			Build string `json:"buildID"`
		}
		c.do("GET", "/templates", nil, &all, 200)
		builds[all[0].Build] = true
		c.do("DELETE", "/sandboxes/"+sb.ID, nil, nil, 204)
		c.Logf("made in %v, builds so far: %d", took.Round(time.Millisecond), len(builds))
		return len(builds) > 1
	})
}
