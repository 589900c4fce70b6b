package sandbox

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
)

// OwnImages names the images that were pulled as a user of their registry for a team, and maybe for others.
func (c *Client) OwnImages(ctx context.Context, team string) (names []string, err error) {
	all, err := c.ctrd.ImageService().List(c.context(ctx))
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	for _, img := range all {
		if _, ok := img.Labels[ownLabel+team]; ok {
			names = append(names, img.Name)
		}
	}
	return names, nil
}

// Disown takes a team's images from it. What was no other team's is removed: it isn't everybody's by that.
func (c *Client) Disown(ctx context.Context, team string) error {
	names, err := c.OwnImages(ctx, team)
	if err != nil {
		return err
	}
	ctx = c.context(ctx)
	var errs []error
	for _, name := range names {
		err := c.disown(ctx, team, name)
		if err != nil && !errdefs.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("take image %s from team %s: %w", name, team, err))
		}
	}
	return errors.Join(errs...)
}

func (c *Client) disown(ctx context.Context, team, name string) error {
	service := c.ctrd.ImageService()
	img, err := service.Get(ctx, name)
	if err != nil {
		return err
	}
	delete(img.Labels, ownLabel+team)
	for label := range img.Labels {
		if strings.HasPrefix(label, ownLabel) {
			_, err := service.Update(ctx, img, "labels")
			return err
		}
	}
	return service.Delete(ctx, name, images.SynchronousDelete())
}
