// Search without a server: a browser starts no worker of a page that was opened from a folder, so a hidden frame runs its script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      this.waiting = []; // messages, until the script runs
      const frame = Object.assign(document.createElement("iframe"), { hidden: true, srcdoc: "<body></body>" });
      frame.onload = () => this.begin(frame.contentWindow, new URL(script, document.baseURI));
      document.body.append(frame);
    }
    begin(inside, url) {
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.onload = () => {
        this.postMessage = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
        this.waiting.forEach((data) => this.postMessage(data));
      };
      script.src = url;
      inside.document.body.append(script);
    }
    postMessage(data) {
      this.waiting.push(data);
    }
    terminate() {}
  };
}
