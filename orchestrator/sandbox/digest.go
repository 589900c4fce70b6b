package sandbox

import "context"

// Digest is that of an image that is here.
func (c *Client) Digest(ctx context.Context, ref string) (string, error) {
	img, _, err := c.find(c.context(ctx), ref)
	if err != nil {
		return "", err
	}
	return img.Target().Digest.String(), nil
}
