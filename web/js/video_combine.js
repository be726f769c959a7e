// What the page's own players lack for Video Combine: moving gifs, a sentence under the first frame of a clip that
// browsers do not play, and a clean change when a node wrote a video before and writes pictures now.
//
// Nothing here is needed to run the graph. A page that no longer knows one of these names shows what it showed
// before: the first frame of a gif, and the first frame without the sentence.
import { app } from "../../../scripts/app.js";

const NODE = "SCD_VideoCombine";
const PAGE_PLAYERS = ["video-preview", "$$comfy_animation_preview", "$$canvas-image-preview"];
const NOTE = "scd-note";
const NOTE_HEIGHT = 64; // three lines within the margins

const ends = (image, ...endings) => endings.some((ending) => image.filename?.toLowerCase().endsWith(ending));

function removeWidget(node, name) {
  const at = node.widgets?.findIndex((widget) => widget.name === name) ?? -1;
  if (at >= 0) {
    node.widgets[at].onRemove?.();
    node.widgets.splice(at, 1);
  }
}

// The page keeps a node that once showed a video a video node for good, and would wait for a gif to play.
function forgetPlayer(node) {
  PAGE_PLAYERS.forEach((name) => removeWidget(node, name));
  node.videoContainer = node.previewMediaType = node.imgs = node.images = undefined;
  node.animatedImages = false;
}

function tell(node, text) {
  if (!text) {
    removeWidget(node, NOTE);
    return;
  }
  let widget = node.widgets?.find((known) => known.name === NOTE);
  if (!widget) {
    const box = document.createElement("div");
    box.style.cssText = "font: 12px sans-serif; color: var(--descrip-text, #999); text-align: center; overflow: hidden;";
    const height = () => NOTE_HEIGHT;
    widget = node.addDOMWidget(NOTE, NOTE, box, { serialize: false, getMinHeight: height, getMaxHeight: height });
    widget.serialize = false; // neither a value of the saved graph nor an input of the node
  }
  widget.element.textContent = text;
}

function executed(node, output) {
  const note = output?.text?.[0];
  if (note && output.images) {
    // The clip stays in the list that clients of the server read; asking this page to show it would be in vain.
    output.images = output.images.filter((image) => ends(image, ".png"));
  }
  const isVideo = Boolean(output?.images?.some((image) => ends(image, ".mp4", ".webm")));
  if (node.scdShowsVideo !== undefined && node.scdShowsVideo !== isVideo) forgetPlayer(node);
  node.scdShowsVideo = isVideo;
  tell(node, note);
}

app.registerExtension({
  name: "SCD.VideoCombine",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== NODE) return;
    const { onExecuted, onDrawForeground } = nodeType.prototype;
    nodeType.prototype.onExecuted = function (output, ...rest) {
      executed(this, output);
      return onExecuted?.call(this, output, ...rest);
    };
    nodeType.prototype.onDrawForeground = function (...args) {
      // Only once its picture is there: told earlier, the page would take the gif for a video.
      if (this.imgs?.length && this.images?.some((image) => ends(image, ".gif"))) this.animatedImages = true;
      return onDrawForeground?.apply(this, args);
    };
  },
});
