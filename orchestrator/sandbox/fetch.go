package sandbox

import (
	"context"
	"fmt"
	"maps"
	"strings"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
)

// ownLabel, with a team behind it, is containerd's label of an image that was pulled as a user of its registry, for that team. One
// without any is everybody's.
const ownLabel = "io.cube.image-of."

// Fetch asks for an image on behalf of a team.
type Fetch struct {
	Ref, Team string
	// User and Secret are for the registry; "" asks as nobody.
	User, Secret string
	Progress     Progress
}

// Fetched is an image that is here.
type Fetched struct {
	Name   string // the full one
	Digest string
	// Env are its variables, KEY=VALUE.
	Env []string
}

// Fetch finds an image that is here or else pulls it, and has the snapshotter make its disk. What another team has pulled as a user
// of its registry isn't here for this one, until the registry lets it have it. A registry of this host, or of a network of its, is asked
// only where the host's configuration describes it: teams name images, and reach nothing by that which they otherwise wouldn't.
func (c *Client) Fetch(ctx context.Context, f Fetch) (Fetched, error) {
	ctx, done, err := c.lease(c.context(ctx))
	if err != nil {
		return Fetched{}, err
	}
	defer done()
	img, name, err := c.find(ctx, f.Ref)
	switch {
	case err == nil && owned(img.Labels(), f.Team):
		err = c.unpack(ctx, img, f.Progress)
	case err == nil || errdefs.IsNotFound(err):
		img, err = c.pull(ctx, name, PullOptions{User: f.User, Secret: f.Secret, Outside: true, Labels: f.labels(img), Progress: f.Progress})
	}
	if err != nil {
		return Fetched{}, err
	}
	spec, err := img.Spec(ctx)
	if err != nil {
		return Fetched{}, fmt.Errorf("read image %s: %w", img.Name(), err)
	}
	env := spec.Config.Env
	if len(env) == 0 {
		env = []string{defaultPath}
	}
	return Fetched{Name: img.Name(), Digest: img.Target().Digest.String(), Env: env}, nil
}

// labels are those of the image when it has been pulled, before which it may have been there for others.
func (f Fetch) labels(there client.Image) map[string]string {
	all := map[string]string{}
	if there != nil {
		maps.Copy(all, there.Labels())
	}
	if f.User != "" || f.Secret != "" {
		all[ownLabel+f.Team] = "true"
	} else { // who lets nobody have it lets everybody
		maps.DeleteFunc(all, func(l, _ string) bool { return strings.HasPrefix(l, ownLabel) })
	}
	return all
}

// owned tells whether a team may use an image without asking its registry.
func owned(labels map[string]string, team string) bool {
	private := false
	for l := range labels {
		private = private || strings.HasPrefix(l, ownLabel)
	}
	return !private || labels[ownLabel+team] != ""
}
